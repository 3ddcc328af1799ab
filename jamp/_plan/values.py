"""Values of a program being planned: their dtypes, and what else is known of them.

A literal, and whatever is derived from literals and boolean masks alone, is free: it
takes the dtype of the operands beside it. Its range is followed through arithmetic, so
that a constant which the narrow dtype would destroy can be kept from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._compat import is_plain_array
from jamp._dtypes import DType, dtype_of

_numbers = count()


class Interval(NamedTuple):
    """The bounds of a constant."""

    low: float
    high: float
    # The smallest magnitude other than zero that it is known to have, or infinity.
    least: float

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


BOOLEAN = Interval(0.0, 1.0, 1.0)


def _range_of(value: Any) -> Interval | None:
    """The range of a literal; None for what is no real number."""
    array = np.asarray(value)
    # JAX's float0 is a structured dtype.
    if array.size == 0 or array.dtype.kind == "c" or array.dtype.names is not None:
        return None
    numbers = array.astype(np.float64).ravel()
    least = _smallest(*numbers.tolist())
    return Interval(float(np.min(numbers)), float(np.max(numbers)), least)


def destroyed(value: Value, dtype: DType) -> bool:
    """Whether rounding to `dtype` makes an infinity of, or zero of, a constant."""
    if not value.follows:
        return False
    interval = value.traits.interval
    numbers, rounded = np.array(interval), _rounded(interval, dtype)
    overflows = np.isfinite(numbers) & ~np.isfinite(rounded)
    return bool(overflows[:2].any() or (numbers[2] > 0 and rounded[2] == 0))


def inexact(value: Value, dtype: DType) -> bool:
    """Whether a scalar constant is another number in `dtype`."""
    number = value.constant
    return number is not None and bool(_rounded(number, dtype) != number)


def _rounded(numbers: Any, dtype: DType) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(numbers, np.float64).astype(dtype).astype(np.float64)


def _smallest(*values: float) -> float:
    """The smallest magnitude other than zero; infinity if there is none."""
    return min((abs(value) for value in values if value != 0), default=math.inf)


def _span(least: float, *values: float) -> Interval | None:
    if any(math.isnan(value) for value in values):
        return None
    low, high = min(values), max(values)
    return Interval(low, high, max(least, low, -high))


def _sum(x: Interval, y: Interval) -> Interval | None:
    ends = x.low + y.low, x.high + y.high
    # Either has its smallest magnitude where the other is zero.
    alone = [b.least for a, b in ((x, y), (y, x)) if a.low <= 0 <= a.high]
    return _span(_smallest(*ends, *alone), *ends)


def _negative(x: Interval) -> Interval:
    return Interval(-x.high, -x.low, x.least)


def _products(x: Interval, y: Interval) -> Interval | None:
    return _span(x.least * y.least, *(a * b for a in x.bounds for b in y.bounds))


def _divide(x: Interval, y: Interval) -> Interval | None:
    if y.low <= 0 <= y.high:
        return None
    least = x.least / max(map(abs, y.bounds))
    return _span(least, *(a / b for a in x.bounds for b in y.bounds))


def _union(*xs: Interval) -> Interval | None:
    return _span(min(x.least for x in xs), *(bound for x in xs for bound in x.bounds))


def _absolute(x: Interval) -> Interval:
    low = 0.0 if x.low <= 0 <= x.high else min(map(abs, x.bounds))
    return Interval(low, max(map(abs, x.bounds)), x.least)


def _between(choose: Any, x: Interval, y: Interval) -> Interval | None:
    ends = choose(x.low, y.low), choose(x.high, y.high)
    return _span(min(x.least, y.least), *ends)


_max, _min = partial(_between, max), partial(_between, min)


ARITHMETIC: Mapping[str, Callable[..., Interval | None]] = {
    "add": _sum,
    "sub": lambda x, y: _sum(x, _negative(y)),
    "mul": _products,
    "div": _divide,
    "neg": _negative,
    "abs": _absolute,
    "max": _max,
    "min": _min,
    "clamp": lambda low, x, high: (found := _max(x, low)) and _min(found, high),
    "select_n": _union,
    "concatenate": _union,
    "pad": _union,
    **dict.fromkeys(_primitives.KEEPING_RANGE, lambda x: x),
}


def propagate(eqn: JaxprEqn, operands: Sequence[Interval | None]) -> Interval | None:
    """The range of an equation's results, if its operands are constants."""
    name = eqn.primitive.name
    rule = ARITHMETIC.get(name)
    if rule is None:
        return None
    if name == "select_n":
        operands = operands[1:]
    elif name in _primitives.KEEPING_RANGE:
        # The others are indices and shapes.
        operands = operands[:1]
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands):
        return None
    found = rule(*known)
    return None if found is None else held(found, dtype_of(eqn.outvars[0]))


def held(interval: Interval, dtype: Any) -> Interval | None:
    """A range as values of a dtype have it; None for complex and wrapping ones."""
    if dtype == np.bool_:
        low = float(not interval.low <= 0 <= interval.high)
        return Interval(low, float(interval.bounds != (0, 0)), 1.0)
    if jnp.issubdtype(dtype, np.complexfloating):
        return None
    numbers = np.array(interval, np.float64)
    if jnp.issubdtype(dtype, np.integer):
        numbers, limits = np.trunc(numbers), jnp.iinfo(dtype)
        if numbers[0] < limits.min or numbers[1] > limits.max:
            return None
    else:
        numbers = _rounded(interval, dtype)
    low, high, least = numbers.tolist()
    return Interval(low, high, least or _smallest(low, high))


class Traits(NamedTuple):
    """What is known of a value beside its dtype; hashable, so that it keys caches."""

    # Bounds, if it follows the dtype of others: it is derived from constants alone.
    interval: Interval | None = None
    # The dimensions along which broadcasting or inserting them repeats it.
    repeated: tuple[int, ...] = ()
    # If it is the direct result of a lowered product, those along which a bias varies,
    # once for each weight in the product.
    free: tuple[tuple[int, ...], ...] = ()
    # Whether it came in the 16-bit dtype in force, or has a lowered product among its
    # ancestors; then it is no weight.
    data: bool = False
    probability: bool = False  # whether a sigmoid, a softmax or the like gave it
    rounded: DType | None = None  # the 16-bit dtype that such a probability has had
    table: bool = False  # whether it is made of iota and literals alone
    # The 16-bit dtype that readers see of a loop's sum, which is kept in float32.
    sums: DType | None = None


class Value:
    __slots__ = "aval casts dtype eligible known number slot source traits".split()

    def __init__(
        self,
        aval: Any,
        traits: Traits | None = None,
        *,
        slot: int | None = None,
        known: Any = None,
    ):
        # Two values of which different things are known may be one array: one number.
        self.number = next(_numbers)
        self.aval = aval  # as traced, in the dtype that it is computed in
        # None for what has none, as a token.
        self.dtype: DType = getattr(aval, "dtype", None)  # type: ignore[assignment]
        # Whether autocast may cast it. A reference holds floats and is none.
        self.eligible = is_plain_array(aval) and _dtypes.eligible(self.dtype)
        self.traits = traits or Traits()
        if self.traits.probability and self.low:
            self.traits = self.traits._replace(rounded=self.dtype)
        self.casts: dict[DType, Value] = {}  # the array in other dtypes
        # Which input of an inner program it is, if casts are left to the caller.
        self.slot = slot
        self.known = known  # the array itself, if it is a constant of the program
        self.source: Value | None = None  # what it was cast from, if in float32

    @classmethod
    def of(cls, aval: Any, dtype: Any, traits: Traits | None = None) -> Value:
        """A value like one of the traced program, in a dtype of its own."""
        return cls(_dtypes.in_dtype(aval, dtype), traits)

    @classmethod
    def literal(cls, literal: Any) -> Value:
        traits = Traits(_range_of(literal.val), table=literal.aval.ndim == 0)
        return cls(literal.aval, traits, known=literal.val)

    def knowing(self, **traits: Any) -> Value:
        """The same array, of which something else is known."""
        known = self.traits._replace(**traits)
        other = Value(self.aval, known, slot=self.slot, known=self.known)
        other.number, other.casts, other.source = self.number, self.casts, self.source
        return other

    @property
    def kept(self) -> Value:
        """What programs hand on: of a loop's sum the float32 that it is kept in."""
        wide = self.casts.get(_dtypes.FLOAT32) if self.traits.sums else None
        return wide.knowing(sums=self.traits.sums) if wide else self

    @property
    def is_kept(self) -> bool:
        return self.traits.sums is not None and self.dtype == _dtypes.FLOAT32

    def seen(self, narrow: Value) -> Value:
        """What readers see of a sum that is kept; those in float32 see the sum."""
        narrow.casts[_dtypes.FLOAT32] = self.knowing(sums=None)
        return narrow.knowing(sums=narrow.dtype)

    @property
    def ndim(self) -> int:
        return self.aval.ndim  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        """Its rank before broadcasting and the insertion of unit dimensions."""
        ndim: int = getattr(self.aval, "ndim", 0)
        return ndim - len(self.traits.repeated)

    @property
    def low(self) -> bool:
        """Whether it has 16 bits."""
        return self.dtype in _dtypes.LOW_DTYPES

    @property
    def follows(self) -> bool:
        """Whether it takes the dtype of the operands beside it."""
        return self.traits.interval is not None

    @property
    def constant(self) -> float | None:
        """The number it stands for, if it is a scalar known before the program runs."""
        interval = self.traits.interval
        if interval is None or self.ndim > 0 or interval.low != interval.high:
            return None
        return interval.low

    def constant_in(self, dtype: DType) -> Value:
        number = np.asarray(self.constant).astype(dtype)[()]
        return Value(_dtypes.in_dtype(self.aval, dtype), self.traits, known=number)


Values = Sequence[Value]
