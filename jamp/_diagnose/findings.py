"""What a diagnosis says of the operations at fault, in words."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jamp._diagnose.diagnosis import (
    ARGUMENT,
    Diagnosis,
    Finding,
    Suggestion,
    Underflow,
)
from jamp._diagnose.examination import Examination, scale_window
from jamp._diagnose.histograms import Histogram
from jamp._diagnose.judge import Fault, kind_of, made_by
from jamp._diagnose.measure import Measured
from jamp._diagnose.outcomes import error_limit, gradient_error, gradient_moved
from jamp._diagnose.program import Subject
from jamp._dtypes import below_float32

# How many operations with underflow are listed.
_LISTED = 3
# What less is lost of is not worth a line.
_LEAST_LOST = 0.01


def diagnosis_of(
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
        scale_window=scale_window(first),
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
        if found.largest <= largest:
            inside = "something that it computes inside is not"
            return f"{what} is not finite, though {dtype} holds its result: {inside}"
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
