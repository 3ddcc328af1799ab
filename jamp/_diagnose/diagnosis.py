"""`jamp.Diagnosis`: what `jamp.diagnose` found, as data, as text and as a picture."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jamp._diagnose.histograms import Histogram, draw
from jamp._tracing.locations import Location

# Stands for an operation where an argument or a constant is at fault.
ARGUMENT = "argument"


@dataclass(frozen=True)
class Finding:
    """One operation in which something went wrong.

    Attributes:
      kind: `'overflow'` (not finite though float32 is), `'underflow'` (zero or nearly
        so), `'precision'` (too far from float32) or `'float32'` (not finite in float32
        either).
      operation: the primitive, also where its result is rounded for a reader;
        `'argument'` for what the program is given.
      dtype: the dtype that it computed, or that its result is rounded to.
      location: the user's line.
      scope: the named scopes around it, such as the path of a module.
      gradient: whether it is part of the backward pass.
      iteration: of the loop that it stands in, where that is known.
      message: what happened, in words.
    """

    kind: str
    operation: str
    dtype: str
    location: Location | None
    scope: str
    gradient: bool
    iteration: int | None
    message: str

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}"
        if self.operation == ARGUMENT:
            return what
        nowhere = "the loss itself" if self.gradient else "unknown location"
        scope = f", in {self.scope}" if self.scope else ""
        return f"{what}\n    at {self.location or nowhere}{scope}"


@dataclass(frozen=True)
class Suggestion:
    """One change that cures what was found, or part of it.

    Attributes:
      code: what to write.
      reason: why, in words.
      cured: whether the program with all suggestions was run again and found healthy.
      options: what of it goes to `jamp.autocast`, as keyword arguments.
      loss_scale: the loss scale, where that is what to change.
    """

    code: str
    reason: str
    cured: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None

    def __str__(self) -> str:
        return f"{self.code}\n    {self.reason}"


@dataclass(frozen=True)
class Underflow:
    """An operation that lost small numbers; often harmless.

    Attributes:
      operation: the primitive.
      location: the user's line.
      flushed: the share of its nonzero elements that became zero.
      subnormal: the share that is left with fewer digits than the dtype has.
    """

    operation: str
    location: Location | None
    flushed: float
    subnormal: float

    def __str__(self) -> str:
        return (
            f"{self.flushed:.1%} zero, {self.subnormal:.1%} subnormal: "
            f"{self.operation} at {self.location or 'unknown location'}"
        )


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What autocast did to the numbers of a program.

    Attributes:
      header: a line on the autocast and the loss scale.
      dtype: the 16-bit dtype.
      findings: the operations at fault: what overflowed in the program's order,
        other ones by their error, the largest first.
      suggestions: what cures them; empty if nothing is wrong.
      errors: the root mean square error of each result, relative to that of its value
        in float32; inf for one that is not finite. That of a gradient which is only
        rounding, such as that of a bias in front of BatchNorm, may be large.
      gradient_error: the error of the gradient as a whole, inf if some of it is not
        finite; None without a loss scale, and where all of it is only rounding.
      gradient_moved: the relative change of float32's gradient, as a whole, where each
        weight moves by half a rounding to the dtype: an error of up to twice that is no
        finding. None where errors are too small to ask.
      underflows: the operations with the most underflow.
      histograms: the sizes of 16-bit values, module by module.
      loss_scale: the loss scale that it was run with.
      scale_window: the smallest loss scale that keeps nine tenths of the gradients'
        elements from becoming zero, and the largest that keeps all finite; None without
        a loss scale, and where gradients are too small or too large to tell.
      unseen: operations that hold programs with 16 bits, as kernels, which are not
        looked into: they ran as they are beside float32 too.
    """

    header: str
    dtype: str
    findings: tuple[Finding, ...]
    suggestions: tuple[Suggestion, ...]
    errors: Mapping[str, float]
    gradient_error: float | None
    gradient_moved: float | None
    underflows: tuple[Underflow, ...]
    histograms: tuple[Histogram, ...]
    loss_scale: float | None
    scale_window: tuple[float, float] | None
    unseen: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def text(self) -> str:
        """The diagnosis as text."""
        lines = [self.header, "", *(self._found() or [self._health()])]
        if self.suggestions:
            lines += ["", self._cure(), *map(str, self.suggestions)]
        lines.append("")
        results = [label for label in self.errors if not label.startswith("gradient")]
        if results:
            worst = max(results, key=self.errors.__getitem__)
            error = self.errors[worst]
            lines.append(f"largest error of a result: {error:.2g} ({worst})")
        if self.healthy and self.loss_scale is None:
            lines.append(
                "gradients were not looked at; of a loss, loss_scale=1.0 looks at them"
            )
        if self.gradient_error is not None:
            lines.append(f"error of the gradient as a whole: {self.gradient_error:.2g}")
        if self.gradient_moved is not None:
            moved = f"{self.gradient_moved:.2g} where weights move by half a rounding"
            lines[-1] += f" (float32's changes by {moved})"
        if self.scale_window:
            low, high = self.scale_window
            window = f"loss scales that fit: {low:g} to {high:g}"
            if low > high:
                window = (
                    f"no loss scale fits all gradients: some want {low:g}, others "
                    f"overflow above {high:g}"
                )
            # What else is changed may move the window.
            other = any(s.loss_scale is None for s in self.suggestions)
            lines.append(f"before the change, {window}" if other else window)
        if self.underflows:
            why = ", which took no result further from float32 than rounding does"
            head = f"most underflow{why if self.healthy else ''}:"
            told = Counter(map(str, self.underflows))
            lines += [head, *(_counted(f"  {text}", told[text]) for text in told)]
        return "\n".join(lines)

    def _found(self) -> list[str]:
        """The findings, those of one line in several modules as one."""
        times: Counter[Any] = Counter()
        alike: dict[Any, list[Finding]] = {}
        for found in self.findings:
            key = found.kind, found.operation, found.location, found.gradient
            times[key, found.scope] += 1  # a line may hold several
            alike.setdefault((key, times[key, found.scope]), []).append(found)
        return [
            str(first) + (f", and in {len(others)} more modules" if others else "")
            for first, *others in alike.values()
        ]

    def _cure(self) -> str:
        """A line on all suggestions together, as they were tried."""
        if not all(suggestion.cured for suggestion in self.suggestions):
            return "what may help:"
        if len(self.suggestions) > 1:
            return "to cure it, all of these (with all, ran again: healthy):"
        return "to cure it (ran again: healthy):"

    def _health(self) -> str:
        """A line on a program without findings."""
        scale, (low, high) = self.loss_scale, self.scale_window or (0.0, math.inf)
        if not self.errors:
            return "nothing to compare: no result is floating or complex"
        if self.unseen:
            names = ", ".join(self.unseen)
            return f"healthy as far as was looked, which is not into {names}"
        if scale is None or low > high or low <= scale <= high:
            return "healthy: nothing is further from float32 than rounding explains"
        side = "below" if scale < low else "above"
        return (
            f"healthy, but loss scale {scale:g} is {side} those that fit ({low:g} to "
            f"{high:g})"
        )

    __str__ = text

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as numbers, strings, lists and dicts, as JSON takes them."""
        return {
            "header": self.header,
            "dtype": self.dtype,
            "healthy": self.healthy,
            "findings": list(map(asdict, self.findings)),
            "suggestions": [
                {"code": s.code, "reason": s.reason, "cured": s.cured}
                for s in self.suggestions
            ],
            "errors": {label: _finite(error) for label, error in self.errors.items()},
            "gradient_error": _finite(self.gradient_error),
            "gradient_moved": _finite(self.gradient_moved),
            "underflows": list(map(asdict, self.underflows)),
            "histograms": [
                {**asdict(h), "counts": h.counts.tolist()} for h in self.histograms
            ],
            "loss_scale": self.loss_scale,
            "scale_window": list(self.scale_window) if self.scale_window else None,
            "unseen": list(self.unseen),
        }

    def plot(self, path: str | Path) -> None:
        """Draws the sizes of activations and gradients beside the dtype's range.

        Args:
          path: the picture to write; its suffix is its format.

        Raises:
          ImportError: matplotlib is not installed.
        """
        state = "healthy" if self.healthy else self.findings[0].message
        sides = [
            [h for h in self.histograms if h.gradient is gradient]
            for gradient in (False, True)
        ]
        window = None
        if self.scale_window and self.loss_scale:
            window = self.loss_scale, *self.scale_window
        draw(path, f"{self.header}\n{state}", self.dtype, sides, window)


def _counted(text: str, times: int) -> str:
    return f"{text}, {times} times" if times > 1 else text


def _finite(number: float | None) -> float | None:
    """A number as JSON has it: there is no infinity."""
    return number if number is not None and math.isfinite(number) else None
