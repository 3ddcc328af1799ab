"""What 16 bits did to the values of a program, beside float32, and what led to what.

Statistics are taken by NumPy, which compiles nothing.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._compat import is_plain_array
from jamp._diagnose.widened import is_unseen
from jamp._tracing import locations

# Exponents that a histogram tells apart; what lies outside counts at its ends.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -64, 63
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


class Pair(NamedTuple):
    computed: Any  # as it is under autocast
    # As if all were float32. Integers, keys and tokens are those under autocast.
    shadow: Any


class Statistics(NamedTuple):
    """How far a value is from float32's, and how much of that began where it was made.

    Of a value in a loop, over all iterations.
    """

    # Root mean square of the error, relative to that of the value in float32. Elements
    # that are not finite in either run are left out.
    error: float
    lost: float  # how much of its power (sum of squares) elements held that became zero
    overflowed: int  # how many elements are not finite though they are in float32
    wild: int  # how many are not finite in float32
    alike: int  # how many of these are the same as computed
    nonzero: int  # elements that are finite and not zero in float32
    flushed: int  # elements that are zero and not so in float32
    subnormal: int  # elements below the smallest normal number of the dtype
    largest: float  # the largest magnitude in float32
    exponents: np.ndarray[Any, Any]  # how many elements have which exponent in float32
    least_error: float  # the least of the errors, where it ran several times
    introduced: float = 0.0  # how much of it no operand had; the sum over all times
    introduced_once: float = 0.0  # the largest part of that sum
    began: int = 0  # elements that overflowed although no operand had
    wild_began: int = 0  # elements not finite in float32 although all operands were
    first: int | None = None  # iteration of a loop in which the first overflow began

    @property
    def blame(self) -> float:
        """How much error began here: at once, or by drifting away in a loop."""
        drift = self.error - self.least_error
        return max(self.introduced_once, min(drift, self.introduced))

    @property
    def underflow(self) -> tuple[float, float]:
        return self.flushed / self.nonzero, self.subnormal / self.nonzero

    def after(self, operands: Sequence[Self], iteration: int | None) -> Self:
        """Those of a result, given those of what it was computed from."""
        inherited = max((operand.error for operand in operands), default=0.0)
        introduced = max(0.0, min(self.error, 1.0) - min(inherited, 1.0))
        began = (
            0 if any(operand.overflowed for operand in operands) else self.overflowed
        )
        return self._replace(
            introduced=introduced,
            introduced_once=introduced,
            began=began,
            wild_began=0 if any(operand.wild for operand in operands) else self.wild,
            first=iteration if began else None,
        )

    def merge(self, other: Self) -> Self:
        """Those of two iterations."""
        pairs = zip(self._fields, self, other, strict=True)
        return type(self)(*(_MERGED[name](a, b) for name, a, b in pairs))


_ADDED = (
    "overflowed wild alike nonzero flushed subnormal exponents introduced began "
    "wild_began"
)
# How statistics of two iterations become one.
_MERGED: dict[str, Any] = {
    **dict.fromkeys(_ADDED.split(), operator.add),
    **dict.fromkeys(("error", "lost", "largest", "introduced_once"), max),
    "least_error": min,
    "first": lambda a, b: min({a, b} - {None}, default=None),
}


def measure(pair: Pair) -> Statistics:
    # Masking a scalar would give no array.
    computed, shadow = map(np.atleast_1d, pair)
    computed = computed.astype(_dtypes.widest([_dtypes.FLOAT32, shadow.dtype]))
    finite, reached = np.isfinite(shadow), np.isfinite(computed)
    same = (computed == shadow) | np.isnan(computed) & np.isnan(shadow)
    nonzero = finite & (shadow != 0)
    flushed = _count(nonzero & (computed == 0))
    small = np.abs(computed) < float(jnp.finfo(pair.computed.dtype).tiny)
    # frexp's mantissa is from 1/2 to 1.
    exponents = np.frexp(shadow[nonzero])[1] - 1
    bins = np.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT

    both = finite & reached
    got, right = computed[both], shadow[both]
    # Squares of large and small numbers overflow and underflow in float32.
    unit = _magnitude(right) or _magnitude(got) or 1.0
    power = _power(right / unit)
    wrong = _power(got / unit - right / unit)
    error = math.sqrt(wrong / power) if power else float(wrong > 0)
    return Statistics(
        error=error,
        lost=_power(right[got == 0] / unit) / power if power else 0.0,
        overflowed=_count(finite & ~reached),
        wild=_count(~finite),
        alike=_count(~finite & same),
        nonzero=_count(nonzero),
        flushed=flushed,
        subnormal=_count(nonzero & small) - flushed,
        largest=_magnitude(shadow[nonzero]),
        exponents=np.bincount(bins, minlength=_BINS),
        least_error=error,
    )


def _count(mask: Any) -> int:
    return int(np.count_nonzero(mask))


def _power(values: Any) -> float:
    return float(np.sum(np.square(values)))


def _magnitude(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0))


def has_shadow(aval: Any) -> bool:
    """Whether a value has a value of its own in the run in float32.

    Numbers and truth values have. Integers (indices, counts) are those of the run under
    autocast in both, lest a tie decided otherwise look like an error.
    """
    if not is_plain_array(aval) or not isinstance(aval.dtype, np.dtype):
        return False
    return aval.dtype == np.bool_ or bool(jnp.issubdtype(aval.dtype, np.inexact))


def is_compared(aval: Any) -> bool:
    """Whether a result is compared: it is floating or complex, and there is some."""
    inexact = is_plain_array(aval) and jnp.issubdtype(aval.dtype, np.inexact)
    return inexact and aval.size > 0


def is_measured(aval: Any) -> bool:
    """Whether a value's statistics are taken: it is floating, and there is some."""
    return is_plain_array(aval) and _dtypes.eligible(aval.dtype) and aval.size > 0


@dataclass(eq=False)
class Measured:
    """One result of an equation of the program, which was measured."""

    number: int  # in the order of the program
    eqns: tuple[JaxprEqn, ...]  # it, and those whose programs it stands in, outwards
    dtype: Any  # the dtype of the result
    scope: tuple[str, ...]  # the named scopes around it, outermost first
    scaled: bool  # whether the result carries the loss scale: it is part of a gradient
    producers: frozenset["Measured"]  # the outputs that it was computed from
    statistics: Statistics  # over all the times that the equation ran

    @property
    def primitive(self) -> str:
        return self.eqns[0].primitive.name

    @property
    def is_product(self) -> bool:
        return self.primitive in _primitives.PRODUCTS

    @property
    def cast(self) -> bool:
        return self.primitive == "convert_element_type"

    @cached_property
    def unseen(self) -> bool:
        """Whether its equation holds a program with 16 bits, the same in both runs."""
        return is_unseen(self.eqns[0])

    @cached_property
    def location(self) -> locations.Location | None:
        return next(filter(None, map(locations.location, self.eqns)), None)

    @property
    def line(self) -> Any:
        """Line and module, forward or backward."""
        return self.location, self.scope, self.scaled

    @property
    def operands(self) -> list["Measured"]:
        """What it was computed from, in the order of the program."""
        return sorted(self.producers, key=operator.attrgetter("number"))

    def merge(self, other: Self) -> None:
        """Adds what was measured in another iteration of a loop."""
        # In another iteration, another branch may be taken.
        self.scaled |= other.scaled
        self.producers |= other.producers
        self.statistics = self.statistics.merge(other.statistics)


def led_to(outputs: Iterable[Measured]) -> list[Measured]:
    """These outputs and all that led to them, nearest first."""
    found = list(dict.fromkeys(outputs))
    seen = set(found)
    for output in found:  # which grows meanwhile
        new = [operand for operand in output.operands if operand not in seen]
        found += new
        seen.update(new)
    return found


def path_to(outputs: Iterable[Measured]) -> list[Measured]:
    """These outputs and all that led to them, in the program's order."""
    return sorted(led_to(outputs), key=operator.attrgetter("number"))


class Tracked(NamedTuple):
    """A value on its way through the program."""

    pair: Pair  # what it is in both runs
    statistics: Statistics | None  # None for what is not measured
    scaled: bool  # whether it depends on the loss scale
    producers: frozenset[Measured]  # the outputs that it came from


def tracked(
    pair: Pair, scaled: bool = False, producers: frozenset[Measured] = frozenset()
) -> Tracked:
    measured = is_measured(jax.typeof(pair.computed))
    return Tracked(pair, measure(pair) if measured else None, scaled, producers)


def entering(array: Any) -> Tracked:
    """A value that enters the program, the same in both runs."""
    return tracked(Pair(array, _dtypes.widened(array)))
