"""Values of a program being planned: their dtypes, and what else is known of them.

A literal, and whatever is derived from literals and boolean masks alone, is free: it
takes the dtype of the operands beside it. Its range is followed through arithmetic, so
that a constant which the narrow dtype would destroy can be kept from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    low: float
    high: float


BOOLEAN = Interval(0.0, 1.0)


def _range_of(value: Any) -> Interval | None:
    """The range of a literal; None for what is no real number."""
    array = np.asarray(value)
    # JAX's float0 is a structured dtype.
    if array.size == 0 or array.dtype.kind == "c" or array.dtype.names is not None:
        return None
    wide = array.astype(np.float64)
    return Interval(float(np.min(wide)), float(np.max(wide)))


def destroyed(interval: Interval, dtype: DType) -> bool:
    """Whether rounding to `dtype` makes an infinity of, or zero of, the constant."""
    bounds = np.array(interval, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = bounds.astype(dtype).astype(np.float64)
    if bool(np.any(np.isfinite(bounds) & ~np.isfinite(rounded))):
        return True
    return interval.low == interval.high != 0 and rounded[0] == 0


def _span(*values: float) -> Interval | None:
    if any(math.isnan(value) for value in values):
        return None
    return Interval(min(values), max(values))


def _products(x: Interval, y: Interval) -> Interval | None:
    return _span(*(a * b for a in x for b in y))


def _divide(x: Interval, y: Interval) -> Interval | None:
    if y.low <= 0 <= y.high:
        return None
    return _span(*(a / b for a in x for b in y))


def _union(*xs: Interval) -> Interval | None:
    return _span(*(bound for x in xs for bound in x))


def _absolute(x: Interval) -> Interval | None:
    low = 0.0 if x.low <= 0 <= x.high else min(map(abs, x))
    return Interval(low, max(map(abs, x)))


ARITHMETIC: Mapping[str, Callable[..., Interval | None]] = {
    "add": lambda x, y: _span(x.low + y.low, x.high + y.high),
    "sub": lambda x, y: _span(x.low - y.high, x.high - y.low),
    "mul": _products,
    "div": _divide,
    "neg": lambda x: Interval(-x.high, -x.low),
    "abs": _absolute,
    "max": lambda x, y: Interval(max(x.low, y.low), max(x.high, y.high)),
    "min": lambda x, y: Interval(min(x.low, y.low), min(x.high, y.high)),
    "clamp": lambda low, x, high: Interval(
        min(max(x.low, low.low), high.low), min(max(x.high, low.high), high.high)
    ),
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
    """A range as values of a dtype have it; None if integers of it would wrap."""
    if dtype == np.bool_:
        low = float(not interval.low <= 0 <= interval.high)
        return Interval(low, float(interval != (0, 0)))
    bounds = np.array(interval, np.float64)
    if jnp.issubdtype(dtype, np.integer):
        bounds, limits = np.trunc(bounds), jnp.iinfo(dtype)
        wraps = (bounds < limits.min) | (bounds > limits.max)
        return None if wraps.any() else Interval(*bounds.tolist())
    with np.errstate(over="ignore", invalid="ignore"):
        return Interval(*bounds.astype(dtype).astype(np.float64).tolist())


class Traits(NamedTuple):
    """What is known of a value beside its dtype; hashable, so that it keys caches."""

    # Bounds, if it follows the dtype of others: it is derived from constants alone.
    interval: Interval | None = None
    rank: int = 0  # its rank before broadcasting and the insertion of unit dimensions
    product: bool = False  # whether it is the direct result of a lowered product
    probability: bool = False  # whether a sigmoid, a softmax or the like gave it
    rounded: DType | None = None  # the 16-bit dtype that such a probability has had


class Value:
    __slots__ = "aval casts dtype eligible known number prepared slot traits".split()

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
        self.traits = traits or Traits(rank=getattr(aval, "ndim", 0))
        self.casts: dict[DType, Value] = {}  # the array in other dtypes
        # Casts that are made with it and count once they are used.
        self.prepared: dict[DType, Value] = {}
        # Which input of an inner program it is, if casts are left to the caller.
        self.slot = slot
        self.known = known  # the array itself, if it is a constant of the program

    @classmethod
    def of(cls, aval: Any, dtype: Any, traits: Traits | None = None) -> Value:
        """A value like one of the traced program, in a dtype of its own."""
        return cls(_dtypes.in_dtype(aval, dtype), traits)

    @classmethod
    def literal(cls, literal: Any) -> Value:
        traits = Traits(_range_of(literal.val), literal.aval.ndim)
        return cls(literal.aval, traits, known=literal.val)

    def knowing(self, traits: Traits) -> Value:
        """The same array, of which something else is known."""
        other = Value(self.aval, traits, slot=self.slot, known=self.known)
        other.number, other.casts = self.number, self.casts
        other.prepared = self.prepared
        return other

    @property
    def ndim(self) -> int:
        return self.aval.ndim  # type: ignore[no-any-return]

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
