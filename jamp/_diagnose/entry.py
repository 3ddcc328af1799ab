"""`jamp.diagnose`: runs a program in float32 and under autocast, side by side."""

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast import unwrapped
from jamp._compat import api_boundary
from jamp._diagnose import judge
from jamp._diagnose.cure import cure
from jamp._diagnose.diagnosis import (
    ARGUMENT,
    Diagnosis,
    Finding,
    Suggestion,
    Underflow,
)
from jamp._diagnose.histograms import Histogram
from jamp._diagnose.judge import Examination, Fault, kind_of, made_by
from jamp._diagnose.measure import Measured
from jamp._diagnose.outcomes import error_limit, gradient_error, gradient_moved
from jamp._diagnose.program import Settings, Subject
from jamp._diagnose.walk import Steps
from jamp._dtypes import below_float32
from jamp._errors import AutocastError, AutocastTypeError, described
from jamp._tracing.checks import check_function, wrong_argnums

# How many operations with underflow are listed.
_LISTED = 3
# What less is lost of is not worth a line.
_LEAST_LOST = 0.01
# How often the plain line of progress is written anew, in equations.
_EVERY = 50


def diagnose(
    fn: Callable[..., Any],
    *inputs: Never,
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    progress: bool | None = None,
    **autocast_options: Any,
) -> Callable[..., Diagnosis]:
    """Finds the operations whose numbers autocast spoils, and what cures them.

    Runs the program under autocast and in float32 side by side, operation by operation,
    through jit, loops, branches, checkpoints and functions with derivative rules. Where
    results, or gradients, are not what float32 gives, it names the operations in which
    that began, and looks for the smallest change that cures it, by running the program
    again.

        print(jamp.diagnose(loss_fn, loss_scale=2.0**15)(params, batch))

    Branches, lengths of loops and integers are those of the run under autocast in both.

    Args:
      fn: the function, as given to `jamp.autocast`, or what that returned, whose own
        options hold. A step, of which part is under autocast, is diagnosed as it runs
        if no options are given.
      loss_scale: the factor of the loss, 1 for none; with it, `fn` returns a scalar
        loss, and its gradient is diagnosed too.
      argnums: which arguments the gradient is taken of; of `flax.nnx` modules, it is
        taken of all their floating state.
      has_aux: whether `fn` returns a pair of the loss and something else.
      progress: whether to show on stderr how far it is; by default if on a terminal.
      **autocast_options: the options of `jamp.autocast`.

    Returns:
      A function of the same arguments that returns a `Diagnosis`.

    Raises:
      AutocastError: an option or a loss scale that there is not, another option than
        that of a function under autocast, or a gradient of what is no scalar loss.
      AutocastTypeError: `fn` is not callable, or there are no arrays to run it on.
      BannedOpError: the policy bans an operation of the program.
    """
    check_function("diagnose", fn, inputs)
    scale, chosen = _checked(loss_scale, argnums)
    inner = unwrapped("diagnose", fn, autocast_options)

    @api_boundary
    def diagnosed(*args: Any, **kwargs: Any) -> Diagnosis:
        subject = Subject.of(inner, args, kwargs, chosen, has_aux)
        steps: Steps = {}

        def run(settings: Settings) -> Examination:
            return judge.examine(subject, settings, steps, partial(_shown, progress))

        # Values that are not finite are expected here.
        with jax.debug_nans(False), jax.debug_infs(False), np.errstate(all="ignore"):
            first = run(Settings(subject.options(inner), scale))
            return _diagnosis(subject, first, *cure(subject, first, run))

    return diagnosed


def _checked_scale(loss_scale: float | None) -> float | None:
    if loss_scale is None:
        return None
    try:
        scale = math.fabs(loss_scale)
    except OverflowError as error:
        raise AutocastError("loss_scale is too large for a float") from error
    except TypeError as error:
        raise AutocastTypeError(
            f"loss_scale must be a number, got {described(loss_scale)}; that of an "
            "optimizer's state is jamp.loss_scale(opt_state)"
        ) from error
    limits = jnp.finfo(np.float32)
    if loss_scale < 0 or not float(limits.tiny) <= scale <= float(limits.max):
        raise AutocastError(
            f"loss_scale must be positive and a float32, got {loss_scale}"
        )
    return float(loss_scale)


def _checked(
    loss_scale: float | None, argnums: Any
) -> tuple[float | None, Sequence[int]]:
    """The loss scale, and the arguments of a gradient, of which without it is none."""
    scale = _checked_scale(loss_scale)
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not all(isinstance(number, Integral) for number in numbers):
        raise wrong_argnums(argnums)
    return scale, () if scale is None else numbers


@contextmanager
def _shown(progress: bool | None, total: int) -> Iterator[Callable[[], object]]:
    """Shows a bar, if there is rich, or a line; yields what moves it on."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        numbers = itertools.count(1)

        def tell() -> None:
            done = next(numbers)
            if done % _EVERY == 0 or done == total:
                sys.stderr.write(f"\rdiagnosing: {done} of {total} operations")
                sys.stderr.flush()

        yield tell
        sys.stderr.write("\n")
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task("diagnosing", total=total))


def _diagnosis(
    subject: Subject,
    first: Examination,
    faults: Sequence[Fault],
    suggestions: tuple[Suggestion, ...],
) -> Diagnosis:
    options, scale = first.settings.options, first.settings.loss_scale
    scaled = "" if scale is None else f", loss scale {scale:g}"
    header = (
        f"autocast on {options.device_type} to {options.dtype.name}, policy "
        f"{options.policy.name}"
    )
    if not options.enabled:
        header = "autocast where the function has it, the rest as written"
    return Diagnosis(
        header=f"{header}{scaled}",
        dtype=options.dtype.name,
        findings=tuple(_finding(fault, subject) for fault in faults),
        suggestions=suggestions,
        errors={outcome.label: outcome.error for outcome in first.outcomes},
        gradient_error=None if scale is None else gradient_error(first.outcomes),
        gradient_moved=gradient_moved(first.outcomes) or None,
        underflows=_underflows(first.measured),
        histograms=_histograms(first.measured, faults),
        loss_scale=scale,
        scale_window=judge.scale_window(first),
        unseen=tuple(sorted({m.primitive for m in first.measured if m.unseen})),
    )


def _finding(fault: Fault, subject: Subject) -> Finding:
    if fault.measured is None:
        named = ", ".join(subject.not_finite())
        what = f"argument {named}" if named else "an argument or a constant"
        message = f"{what} is not finite, so that float32 is not finite either"
        return Finding(fault.kind, ARGUMENT, "", None, "", False, None, message)
    measured, computed = fault.measured, made_by(fault.measured)
    return Finding(
        kind=fault.kind,
        operation=computed.primitive,
        dtype=measured.dtype.name,
        location=computed.location,
        scope="/".join(computed.scope),
        gradient=measured.scaled,
        iteration=measured.statistics.first,
        message=_message(fault, measured, computed),
    )


def _message(fault: Fault, measured: Measured, made: Measured) -> str:
    kind = fault.kind
    found, name, dtype = measured.statistics, measured.primitive, measured.dtype.name
    what = f"a cast to {dtype}" if measured.cast else f"{name} in {dtype}"
    if made is not measured:
        what = f"{made.primitive} rounded to {dtype}"
        if measured.location not in (None, made.location):
            what += f" for line {measured.location.line}"
    what += " of the gradient" if measured.scaled else ""
    then = ", of which later operations make inf or NaN" if fault.spoils else ""
    if kind == "float32" and measured.unseen:
        return f"{name} is not finite; it is not looked into, and float32 may be finite"
    if kind == "float32":
        return f"float32 is not finite either, from {name} on"
    if kind == "overflow":
        largest = float(jnp.finfo(dtype).max)
        when = "" if found.first is None else f", first in iteration {found.first}"
        # Just above the largest number, as 65536 is, takes more digits to tell.
        digits = 3 if found.largest > 1.01 * largest else 6
        return (
            f"{what} is not finite: it reaches {found.largest:.{digits}g}, {dtype} "
            f"holds {largest:.{digits}g}{when}"
        )
    if kind == "underflow":
        zero, small = found.underflow
        return f"{what} makes {zero:.0%} of it zero and {small:.0%} subnormal{then}"
    if not then and found.error <= error_limit(dtype):
        then = ", which later operations amplify"
    return f"{what} has a relative error of {found.error:.2g}{then}"


def _underflows(measured: Sequence[Measured]) -> tuple[Underflow, ...]:
    found = [
        Underflow(m.primitive, m.location, *m.statistics.underflow)
        for m in measured
        if below_float32(m.dtype)
        and m.statistics.nonzero
        and sum(m.statistics.underflow) >= _LEAST_LOST
        and kind_of(m, share=0.0) == "underflow"
    ]
    found.sort(key=lambda u: u.flushed + u.subnormal, reverse=True)
    return tuple(found[:_LISTED])


def _histograms(
    measured: Sequence[Measured], faults: Sequence[Fault]
) -> tuple[Histogram, ...]:
    counts: dict[tuple[str, bool], Any] = defaultdict(int)
    kinds: dict[tuple[str, bool], dict[str, None]] = defaultdict(dict)
    at_fault = {fault.measured: fault.kind for fault in faults}
    for m in measured:
        function = m.location.function if m.location else "unknown"
        key = "/".join(m.scope) or function, m.scaled
        if m in at_fault:
            kinds[key][at_fault[m]] = None
        if m in at_fault or below_float32(m.dtype):
            counts[key] += m.statistics.exponents
    return tuple(Histogram(*key, counts[key], tuple(kinds[key])) for key in counts)
