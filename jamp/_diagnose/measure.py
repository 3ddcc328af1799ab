"""What 16 bits did to the values of a program, beside float32, and what led to what.

Statistics are taken by NumPy, which compiles nothing.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._compat import is_plain_array
from jamp._tracing import origin

# Exponents that a histogram tells apart; what lies outside counts at its ends.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -64, 63
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1

# How statistics of two iterations become one, where they are not added.
_MERGED = {"largest": max, "error": max, "least_error": min, "introduced_once": max}


class Pair(NamedTuple):
    computed: Any  # as it is under autocast
    # As if all were float32; None for what has none, as integers, keys and tokens.
    shadow: Any

    @property
    def wide(self) -> Any:
        return self.computed if self.shadow is None else self.shadow


class Statistics(NamedTuple):
    nonzero: int  # elements that are finite and not zero in float32
    wild: int  # elements that are not finite in float32 either
    flushed: int  # elements that are zero and not so in float32
    subnormal: int  # elements below the smallest normal number of the dtype
    largest: float  # the largest magnitude in float32
    error: float  # root mean square of the error, relative to that of the value
    least_error: float  # the least of these errors, where it ran several times
    introduced: float  # how much of the error no operand had; the sum over all times
    introduced_once: float  # the largest part of that sum
    began: int  # elements that overflowed although no operand had
    wild_began: int  # elements not finite in float32 although all operands were
    first: int | None  # iteration of a loop in which the first overflow began
    exponents: np.ndarray[Any, Any]  # how many elements have which exponent in float32

    @property
    def blame(self) -> float:
        """How much error began here: at once, or by drifting away in a loop."""
        drift = self.error - self.least_error
        return max(self.introduced_once, min(drift, self.introduced))

    @property
    def underflow(self) -> tuple[float, float]:
        return self.flushed / self.nonzero, self.subnormal / self.nonzero

    def smaller(self, exponent: int) -> int:
        """How many elements have a smaller exponent in float32."""
        return int(self.exponents[: max(0, exponent - LOWEST_EXPONENT)].sum())

    def merge(self, other: Self) -> Self:
        merged = {
            name: _MERGED.get(name, operator.add)(ours, theirs)
            for name, ours, theirs in zip(self._fields, self, other, strict=True)
            if name != "first"
        }
        iterations = [i for i in (self.first, other.first) if i is not None]
        return self._replace(**merged, first=min(iterations, default=None))


def has_shadow(aval: Any) -> bool:
    """Whether a value has a value of its own in the run in float32.

    Numbers and truth values have. Integers (indices, counts) are those of the run under
    autocast in both, lest a tie decided otherwise look like an error.
    """
    dtype = getattr(aval, "dtype", None)
    return (
        is_plain_array(aval)
        and isinstance(dtype, np.dtype)
        and (dtype == np.bool_ or bool(jnp.issubdtype(dtype, np.inexact)))
    )


def is_measured(aval: Any) -> bool:
    """Whether a value's statistics are taken: it is floating, and there is some."""
    return has_shadow(aval) and _dtypes.eligible(aval.dtype) and aval.size > 0


class State(NamedTuple):
    """How far a value is from float32's."""

    # Root mean square of the error, relative to that of the value in float32. Elements
    # that are not finite in either run are left out.
    error: float
    overflowed: int  # how many elements are not finite though they are in float32
    wild: int  # how many are not finite in float32
    alike: int  # how many of these are the same as computed
    lost: float  # how much of its power (sum of squares) elements held that became zero


def state_of(pair: Pair) -> State:
    computed, shadow = _arrays(pair)
    finite, reached = np.isfinite(shadow), np.isfinite(computed)
    both = finite & reached
    alike = ~finite & ((computed == shadow) | np.isnan(computed) & np.isnan(shadow))
    computed, shadow = computed[both], shadow[both]
    # Squares of large and small numbers overflow and underflow in float32.
    unit = _magnitude(shadow) or _magnitude(computed) or 1.0
    power = float(np.sum(np.square(shadow / unit)))
    error = float(np.sum(np.square(computed / unit - shadow / unit)))
    lost = float(np.sum(np.square(shadow[computed == 0] / unit)))
    return State(
        error=math.sqrt(error / power) if power else float(error > 0),
        overflowed=int(np.count_nonzero(finite & ~reached)),
        wild=int(np.count_nonzero(~finite)),
        alike=int(np.count_nonzero(alike)),
        lost=lost / power if power else 0.0,
    )


def measure(
    pair: Pair, operands: Sequence[State], iteration: int | None
) -> tuple[Statistics, State]:
    """Statistics of a floating result, and its state, given those of its operands."""
    state = state_of(pair)
    computed, shadow = _arrays(pair)
    nonzero = np.isfinite(shadow) & (shadow != 0)
    small = nonzero & (np.abs(computed) < float(jnp.finfo(pair.computed.dtype).tiny))
    flushed = int(np.count_nonzero(nonzero & (computed == 0)))
    inherited = max((operand.error for operand in operands), default=0.0)
    introduced = max(0.0, min(state.error, 1.0) - min(inherited, 1.0))
    began = 0 if any(operand.overflowed for operand in operands) else state.overflowed
    # frexp's mantissa is from 1/2 to 1.
    exponents = np.frexp(shadow[nonzero])[1] - 1
    bins = np.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    statistics = Statistics(
        nonzero=int(np.count_nonzero(nonzero)),
        wild=state.wild,
        flushed=flushed,
        subnormal=int(np.count_nonzero(small)) - flushed,
        largest=_magnitude(shadow[nonzero]),
        error=state.error,
        least_error=state.error,
        introduced=introduced,
        introduced_once=introduced,
        began=began,
        wild_began=0 if any(operand.wild for operand in operands) else state.wild,
        first=iteration if began else None,
        exponents=np.bincount(bins, minlength=_BINS),
    )
    return statistics, state


def _arrays(pair: Pair) -> tuple[Any, Any]:
    # Masking a scalar would give no array.
    computed, shadow = np.atleast_1d(pair.computed), np.atleast_1d(pair.shadow)
    return computed.astype(_dtypes.FLOAT32), shadow


def _magnitude(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0))


@dataclass(frozen=True, eq=False)
class Measured:
    """One result of an equation of the program, which was measured."""

    eqn: JaxprEqn
    dtype: Any  # the dtype of the result
    scope: tuple[str, ...]  # the named scopes around it, outermost first
    callers: tuple[JaxprEqn, ...]  # whose programs it stands in, outermost first
    scaled: bool  # whether the result carries the loss scale: it is part of a gradient
    producers: frozenset[int]  # numbers of the outputs that it was computed from
    statistics: Statistics  # over all the times that the equation ran

    @property
    def primitive(self) -> str:
        return self.eqn.primitive.name

    @property
    def matmul(self) -> bool:
        return self.primitive in _primitives.MATMULS

    @property
    def cast(self) -> bool:
        return self.primitive == "convert_element_type"

    @property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        return (self.eqn, *reversed(self.callers))

    @property
    def location(self) -> origin.Location | None:
        return next(filter(None, map(origin.location, self.eqns)), None)

    @property
    def line(self) -> Any:
        """Line and module, forward or backward."""
        return self.location, self.scope, self.scaled

    def merge(self, other: Self) -> Self:
        """The output with what was measured in another iteration of a loop."""
        # In another iteration, another branch may be taken.
        return replace(
            self,
            scaled=self.scaled or other.scaled,
            producers=self.producers | other.producers,
            statistics=self.statistics.merge(other.statistics),
        )


class Tracked(NamedTuple):
    pair: Pair  # what it is in both runs
    state: State | None  # how far it is from float32's; None for what is not measured
    scaled: bool  # whether it depends on the loss scale
    producers: frozenset[int]  # the outputs that it came from


class Ledger:
    """What was measured, output by output, and what was computed from what."""

    def __init__(self) -> None:
        # The outputs in the order of the program, in which they are numbered.
        self.measured: list[Measured] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def note(self, var: Any, found: Measured) -> int:
        """Keeps what was measured of a variable; returns the number of the output."""
        key = (*map(id, found.callers), id(var))
        number = self._numbers.setdefault(key, len(self.measured))
        if number == len(self.measured):
            self.measured.append(found)
        else:
            self.measured[number] = self.measured[number].merge(found)
        return number

    def inside(self, callers: Iterable[JaxprEqn]) -> frozenset[int]:
        """The outputs that stand in the program of the last of some equations."""
        key = tuple(map(id, callers))
        return frozenset(n for k, n in self._numbers.items() if k[: len(key)] == key)

    def operands(self, measured: Measured) -> list[Measured]:
        return [self.measured[number] for number in measured.producers]

    def terms(self, number: int) -> float:
        """The largest of the numbers whose sum or difference an output is."""
        measured = self.measured[number]
        if measured.primitive in ("add", "neg", "sub"):
            return max(map(self.terms, measured.producers), default=0.0)
        return measured.statistics.largest

    def behind(self, measured: Measured) -> list[Measured]:
        return [self.measured[n] for n in self._ancestors(measured.producers)]

    def led_to(self, numbers: Iterable[int]) -> list[Measured]:
        """These outputs and all that led to them, in the program's order."""
        return [self.measured[n] for n in sorted(self._ancestors(numbers))]

    def _ancestors(self, numbers: Iterable[int]) -> list[int]:
        """These outputs and all that led to them, nearest first."""
        found = list(dict.fromkeys(numbers))
        seen = set(found)
        for number in found:  # which grows meanwhile
            new = sorted(self.measured[number].producers - seen)
            found += new
            seen.update(new)
        return found
