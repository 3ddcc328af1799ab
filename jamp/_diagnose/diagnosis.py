"""`jamp.Diagnosis`: what `jamp.diagnose` found, as data, as text and as a picture."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jamp._diagnose.measure import LOWEST_EXPONENT
from jamp._tracing.locations import Location

# Stands for an operation where an argument or a constant is at fault.
ARGUMENT = "argument"
# Of more modules than these, those with findings and the most values are drawn.
_ROWS = 14
# Letters of a module's path beside its row.
_LABEL = 28
# How many powers of 2 beyond the dtype's range are told apart.
_OUTSIDE_SHOWN = 6
_INSIDE, _OUTSIDE, _HARMLESS = "#2f6f9f", "#c8452f", "#e3b6aa"
_NORMAL, _SUBNORMAL = "#e4f0e6", "#faf1d4"
_GRAY = "#555555"


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
        state = "ran again: healthy" if self.cured else "not verified"
        return f"{self.code}\n    {self.reason} ({state})"


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


@dataclass(frozen=True)
class Histogram:
    """How large the 16-bit values of a module are, in float32.

    Attributes:
      module: its path, or the function that the values are computed in.
      gradient: whether they are gradients of the scaled loss.
      findings: the kinds of the findings among them.
      counts: how many values have which exponent, beginning with 2^-64; larger and
        smaller ones count at the ends.
    """

    module: str
    gradient: bool
    counts: np.ndarray[Any, Any] = field(compare=False)
    findings: tuple[str, ...] = ()

    @property
    def exponents(self) -> np.ndarray[Any, Any]:
        """The exponents that `counts` counts."""
        return np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + len(self.counts))


@dataclass(frozen=True)
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
      gradient_error: the error of the gradient as a whole; None without a loss scale.
      gradient_moved: the relative change of float32's gradient, as a whole, where each
        weight moves by half a rounding to the dtype: an error of up to twice that is no
        finding. None where errors are too small to ask.
      underflows: the operations with the most underflow.
      histograms: the sizes of 16-bit values, module by module.
      loss_scale: the loss scale that it was run with.
      scale_window: the smallest loss scale that keeps nine tenths of the gradients'
        elements from becoming zero, and the largest that keeps all finite; None without
        a loss scale, and where gradients are too small or too large to tell.
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

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def text(self) -> str:
        """The diagnosis as text."""
        lines = [self.header, "", *(self._found() or [self._health()])]
        if self.suggestions:
            lines += ["", "to cure it:", *map(str, self.suggestions)]
        lines.append("")
        results = [label for label in self.errors if not label.startswith("gradient")]
        if results:
            worst = max(results, key=self.errors.__getitem__)
            error = self.errors[worst]
            lines.append(f"largest error of a result: {error:.2g} ({worst})")
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
            lines += [head, *(f"  {u}" for u in self.underflows)]
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

    def _health(self) -> str:
        """A line on a program without findings."""
        scale, (low, high) = self.loss_scale, self.scale_window or (0.0, math.inf)
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
        }

    def plot(self, path: str | Path) -> None:
        """Draws the sizes of activations and gradients beside the dtype's range.

        Args:
          path: the picture to write; its suffix is its format.

        Raises:
          ImportError: matplotlib is not installed.
        """
        # matplotlib need not be installed for anything else.
        from matplotlib.figure import Figure

        sides = [_drawn(self.histograms, gradient) for gradient in (False, True)]
        sides = [side for side in sides if side] or [[]]
        rows = max(1, *map(len, sides))
        size = (1 + 4.8 * len(sides), 2.4 + 0.5 * rows)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        heights = {"height_ratios": [rows + 0.8, 0.6]}
        grid: Any = figure.subplots(2, len(sides), squeeze=False, gridspec_kw=heights)
        at_fault = any(histogram.findings for histogram in self.histograms)
        for axes in grid.flat:
            axes.spines[["top", "right", "left"]].set_visible(False)
        for (axes, below), side in zip(grid.T, sides, strict=True):
            _draw_histograms(
                axes, side, self.dtype, _HARMLESS if at_fault else _OUTSIDE
            )
            if self.scale_window and self.loss_scale and side and side[0].gradient:
                _draw_window(below, self.loss_scale, self.scale_window)
            else:
                below.set_axis_off()
        state = "healthy" if self.healthy else self.findings[0].message
        figure.suptitle(f"{self.header}\n{state}", fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def _finite(number: float | None) -> float | None:
    """A number as JSON has it: there is no infinity."""
    return number if number is not None and math.isfinite(number) else None


def _drawn(histograms: Sequence[Histogram], gradient: bool) -> list[Histogram]:
    """Those with findings and those with the most values, in the program's order."""
    found = [h for h in histograms if h.gradient is gradient and h.counts.any()]
    order = sorted(found, key=lambda h: (not h.findings, -h.counts.sum()))
    at_fault = sum(bool(histogram.findings) for histogram in found)
    kept = set(map(id, order[: max(_ROWS, at_fault)]))
    return [histogram for histogram in found if id(histogram) in kept]


def _draw_histograms(
    axes: Any, histograms: Sequence[Histogram], dtype: str, harmless: str
) -> None:
    """One histogram in a row, each as high as its row; the first module on top."""
    info = jnp.finfo(dtype)
    bounds = (info.smallest_subnormal, info.tiny, info.max)
    lowest, normal, high = (float(np.log2(np.float64(bound))) for bound in bounds)
    seen: list[float] = []
    for row, histogram in enumerate(histograms):
        # What is far outside of the dtype's range is at its edge.
        ends = lowest - _OUTSIDE_SHOWN, np.ceil(high) + _OUTSIDE_SHOWN
        shown, place = np.unique(histogram.exponents.clip(*ends), return_inverse=True)
        counts = np.bincount(place, histogram.counts)
        seen += shown[counts > 0].tolist()
        # Roots show small counts, as of values that do not fit.
        heights = -0.85 * np.sqrt(counts / counts.max())
        inside = (shown >= lowest) & (shown < np.ceil(high))
        outside = _OUTSIDE if histogram.findings else harmless
        colors = np.where(inside, _INSIDE, outside)
        axes.bar(shown + 0.5, heights, 1.0, bottom=row + 0.45, color=colors)
        if histogram.findings:
            axes.axhspan(row - 0.45, row + 0.5, fill=False, ec=_OUTSIDE, lw=1.5)
    names = list(map(_label, histograms))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for label, histogram in zip(axes.get_yticklabels(), histograms, strict=True):
        if histogram.findings:
            label.set(color=_OUTSIDE, fontweight="bold")
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    gradient = bool(histograms) and histograms[0].gradient
    kind = "scaled gradients" if gradient else "weights and activations"
    axes.set_title(f"{kind} in {dtype}", fontsize=10, loc="left")
    axes.set_xlabel("magnitude in float32, power of 2", fontsize=9)
    left, right = min(seen, default=0.0), max(seen, default=0.0)
    # An end of the range that is near is shown too.
    left = min(left, max(lowest, left - 16)) - 1
    right = max(right + 1, min(high, right + 16)) + 1
    axes.set_xlim(left, right)
    _draw_range(axes, left, lowest, normal, high, right)


def _draw_range(axes: Any, *edges: float) -> None:
    """Shades what the dtype holds, and says so where there is room."""
    left, lowest, _, high, right = edges
    parts = [
        ("zero", _OUTSIDE, None),
        ("fewer digits", _GRAY, _SUBNORMAL),
        ("all digits", _GRAY, _NORMAL),
        ("inf", _OUTSIDE, None),
    ]
    for (name, color, shade), (start, end) in zip(parts, pairwise(edges), strict=True):
        if shade:
            axes.axvspan(start, end, color=shade, zorder=0, lw=0)
        start, end = max(start, left), min(end, right)
        if end - start > len(name) * (right - left) / 72:
            middle = (start + end) / 2
            axes.text(middle, -0.75, name, color=color, fontsize=8, ha="center")
    for edge in (lowest, high):
        if left < edge < right:
            axes.axvline(edge, color=_OUTSIDE, lw=1, zorder=1)


def _label(histogram: Histogram) -> str:
    name = histogram.module
    longest = max(name.split("/"), key=len)
    kept = max(_LABEL - len(name) + len(longest) - 3, 8)
    if len(name) > _LABEL and len(longest) > kept + 3:
        # The other names tell it from modules of the same kind.
        ends = longest[: kept // 2], longest[-kept // 2 :]
        name = name.replace(longest, "...".join(ends), 1)
    short = name if len(name) <= _LABEL else f"...{name[3 - _LABEL :]}"
    kinds = ", ".join(histogram.findings)
    return f"{kinds} \u25b6 {short}" if kinds else short


def _draw_window(axes: Any, scale: float, window: tuple[float, float]) -> None:
    axes.set_yticks([])
    axes.set_xlabel("loss scale, power of 2", fontsize=9)
    low, high = np.log2(window)
    here = np.log2(scale)
    if low <= high:
        axes.axvspan(low, high, color=_NORMAL, lw=0)
        axes.text((low + high) / 2, 0.62, "fits", fontsize=8, color=_GRAY, ha="center")
    fits = low <= here <= high
    axes.plot([here], [0.3], "o", color=_INSIDE if fits else _OUTSIDE, ms=7)
    axes.set_ylim(0, 1)
    axes.set_xlim(min(low, high, here) - 2, max(low, high, here) + 2)
