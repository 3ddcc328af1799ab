"""Constants of the program: the range of what literals and masks evaluate to.

A literal, and whatever is derived from literals and boolean masks alone, is free: it
takes the dtype of the operands beside it. Its range is followed through arithmetic, so
that a constant which the narrow dtype would destroy can be kept from it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _primitives as primitives
from jamp._dtypes import DType, dtype_of


class Interval(NamedTuple):
    """Bounds of the values that a constant holds."""

    low: float
    high: float


BOOLEAN = Interval(0.0, 1.0)


def of_array(value: Any) -> Interval | None:
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
    **dict.fromkeys(primitives.KEEPING_RANGE, lambda x: x),
}


def propagate(eqn: JaxprEqn, operands: Sequence[Interval | None]) -> Interval | None:
    """The range of an equation's results, if its operands are constants."""
    name = eqn.primitive.name
    rule = ARITHMETIC.get(name)
    if rule is None:
        return None
    if name == "select_n":
        operands = operands[1:]
    elif name in primitives.KEEPING_RANGE:
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
