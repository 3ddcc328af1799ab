"""Which operations are at fault for what is wrong with a program's results."""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax.numpy as jnp

from jamp._diagnose.measure import LOWEST_EXPONENT, Measured, led_to, path_to
from jamp._diagnose.outcomes import ROUNDINGS, Verdict
from jamp._dtypes import below_float32
from jamp._primitives import FUNCTIONS, MOVEMENT
from jamp._tracing.users_casts import is_explicit

# A result has underflowed if more of it is below the normal numbers of its dtype.
UNDERFLOWED = 0.5
# Operations that introduced at least this share of what the worst of them did.
SUSPECT = 0.5


class Fault(NamedTuple):
    """What is wrong with an operation."""

    kind: str  # `'overflow'`, `'underflow'`, `'precision'` or `'float32'`
    measured: Measured | None  # None if an argument or a constant is not finite
    spoils: bool = False  # whether a later operation makes inf or NaN of it


def kind_of(measured: Measured, share: float = UNDERFLOWED) -> str:
    """The kind of fault; it underflowed if more than a share of it is too small."""
    found = measured.statistics
    # Only small numbers underflow; a difference may be zero for another reason.
    lowest = int(jnp.finfo(measured.dtype).minexp)
    small = found.exponents[: max(0, lowest - LOWEST_EXPONENT)].sum()
    return "underflow" if small > share * found.nonzero else "precision"


def find_faults(verdict: Verdict) -> list[Fault]:
    wild, path = (
        path_to(m for outcome in outcomes for m in outcome.producers)
        for outcomes in verdict
    )
    faults: list[Fault] = []
    if verdict.wild:
        began = [m for m in wild if m.statistics.wild_began]
        faults.append(Fault("float32", began[0] if began else None))
    overflowed = one_per_line(m for m in path if m.statistics.began)
    found = list(map(_overflow, overflowed))
    if not overflowed:
        infinite = [o for o in verdict.wrong if math.isinf(o.error)]
        spoil = {*path_to(m for outcome in infinite for m in outcome.producers)}
        suspects = map(_beginning, _suspects(path))
        found = [Fault(kind_of(m), m, m in spoil) for m in suspects]
    return [*faults, *one_per_line(found, attrgetter("measured.line"))]


def one_per_line(found: Iterable[Any], line: Any = attrgetter("line")) -> list[Any]:
    """The first of each line and module, forward and backward."""
    first: dict[Any, Any] = {}
    for each in found:
        first.setdefault(line(each), each)
    return list(first.values())


def made_by(rounding: Measured) -> Measured:
    """What computed the numbers that a cast rounds which the user did not write."""
    if not rounding.cast or is_explicit(rounding.eqns[0]):
        return rounding
    found = rounding
    while found is rounding or found.primitive in MOVEMENT:
        if len(found.producers) != 1:
            return rounding
        (found,) = found.producers
    # A gradient is told at the line whose derivative it is.
    return rounding if rounding.scaled and found.line != rounding.line else found


def behind(fault: Fault) -> list[Measured]:
    """The operations in 16 bits that led to a fault, nearest first, one per line."""
    found = led_to(fault.measured.operands) if fault.measured else []
    return one_per_line(m for m in found if below_float32(m.dtype))


def _beginning(found: Measured) -> Measured:
    """The operation behind one that only passes an error on, or amplifies it."""
    while _passes_on(found):
        wrong = [m for m in found.producers if m.statistics.error]
        if len(wrong) != 1:
            break
        (found,) = wrong
    return found


def _passes_on(measured: Measured) -> bool:
    """Whether an operation rounds by far less than its result is wrong."""
    found = measured.statistics
    if found.introduced != found.introduced_once:
        # In a loop, the carry may have brought the error.
        return False
    if not below_float32(measured.dtype) or not found.introduced:
        return True
    return (
        measured.primitive in FUNCTIONS
        and kind_of(measured) == "precision"
        and found.error > ROUNDINGS * float(jnp.finfo(measured.dtype).eps)
    )


def _suspects(path: Sequence[Measured]) -> list[Measured]:
    """The operations in which most of an error began, the worst first."""
    worst = max((m.statistics.blame for m in path), default=0.0)
    found = [m for m in path if m.statistics.blame >= SUSPECT * worst > 0]
    return sorted(found, key=lambda m: -m.statistics.blame)


def _overflow(measured: Measured) -> Fault:
    """The fault behind a result that is not finite.

    A result that the dtype could hold is not finite because of an operand: one that
    became zero and is divided by, or one that was negative by its error only.
    """
    if measured.statistics.largest > float(jnp.finfo(measured.dtype).max):
        return Fault("overflow", measured)
    cause, zeros = measured, [measured]
    while zeros:
        cause = zeros[0]
        zeros = [m for m in cause.operands if m.statistics.flushed]
    if cause is not measured:
        # A single zero that is divided by is a fault.
        return Fault(kind_of(cause, share=0.0), cause, spoils=True)
    suspects = _suspects(path_to(measured.producers))
    if not suspects:
        return Fault("overflow", measured)
    return Fault(kind_of(suspects[0]), suspects[0], spoils=True)
