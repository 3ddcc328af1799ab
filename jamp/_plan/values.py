"""Values of a program being planned: their dtypes, and what else is known of them.

A literal, and whatever is derived from literals and boolean masks alone, follows: it
takes the dtype of the operands beside it. Its numbers are known through arithmetic, so
that a constant which the narrow dtype would destroy can be kept from it.

A sum that a loop carries is two values. Programs hand on the one in float32 (`kept`);
what reads it has the other, its 16 bits (`as_read`), whose traits say of which sum they
are. A rule for a program gives `kept` to the program and takes `kept` of its results:
what it gives as it is enters as 16 bits like any others (`handed_over`), and what is
added to it in that program is rounded.
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
from jamp._dtypes import DType, dtype_of, in_range, shape_of

_ids = count()
# The numbers that a constant may have, of many the extremes alone.
Numbers = frozenset[float]
_MOST_NUMBERS = 64
BOOLEAN: Numbers = frozenset({0.0, 1.0})


def _numbers(values: Any) -> Numbers | None:
    """The different numbers among some, NaN as one; None for complex and no numbers."""
    values = np.asarray(values)
    # JAX's float0 is a structured dtype.
    if values.size == 0 or values.dtype.kind == "c" or values.dtype.names is not None:
        return None
    if values.ndim == 0:
        number = float(values)
        return frozenset([math.nan if math.isnan(number) else number])
    found = np.unique(values.astype(np.float64))
    # One object, which sets find by its identity: NaN equals nothing.
    nan = [math.nan] if np.isnan(found).any() else []
    found = found[~np.isnan(found)]
    if len(found) > _MOST_NUMBERS:
        by_size = found[np.argsort(np.abs(found))]
        nonzero = by_size[by_size != 0]
        found = np.array([found[0], found[-1], by_size[0], nonzero[0]])
    return frozenset(found.tolist() + nan)


def destroyed(value: Value, dtype: DType) -> bool:
    """Whether rounding to `dtype` makes an infinity of, or zero of, a constant."""
    if value.traits.constants is None:
        return False
    numbers = np.array([*value.traits.constants])
    rounded = _rounded(numbers, dtype)
    overflows = np.isfinite(numbers) & ~np.isfinite(rounded)
    return bool((overflows | (numbers != 0) & (rounded == 0)).any())


def inexact(value: Value, dtype: DType) -> bool:
    """Whether a constant has numbers that are others in `dtype`."""
    if value.traits.constants is None:
        return False
    numbers = np.array([*value.traits.constants])
    return not np.array_equal(_rounded(numbers, dtype), numbers, equal_nan=True)


def _rounded(numbers: Any, dtype: DType) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(numbers, np.float64).astype(dtype).astype(np.float64)


# Their results have the numbers of all their operands.
NUMPY_OF: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    **dict.fromkeys(_primitives.JOINING, lambda *xs: np.hstack(xs)),
    **dict.fromkeys(_primitives.KEEPING_ELEMENTS, lambda x: x),
}


def propagate(eqn: JaxprEqn, operands: Sequence[Numbers | None]) -> Numbers | None:
    """The numbers of an equation's results, if its operands are constants."""
    name = eqn.primitive.name
    if name not in NUMPY_OF:
        return None
    if name == "select_n":
        operands = operands[1:]
    elif name in _primitives.KEEPING_ELEMENTS:
        # The others are indices and shapes.
        operands = operands[:1]
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands) or (name == "div" and 0 in known[1]):
        return None
    arrays = [np.array([*numbers]) for numbers in known]
    if name not in _primitives.JOINING:
        arrays = [*np.ix_(*arrays)]
    with np.errstate(all="ignore"):
        found = _numbers(NUMPY_OF[name](*arrays))
    return found and held(found, dtype_of(eqn.outvars[0]))


def held(numbers: Numbers, dtype: Any) -> Numbers | None:
    """Numbers as a dtype has them; None for complex and wrapping ones."""
    found = np.array([*numbers])
    if dtype == np.bool_:
        return _numbers(found != 0)
    if jnp.issubdtype(dtype, np.complexfloating):
        return None
    if jnp.issubdtype(dtype, np.integer):
        found, limits = np.trunc(found), jnp.iinfo(dtype)
        # Not so for NaN.
        fits = limits.min <= found.min() and found.max() <= limits.max
        return _numbers(found) if fits else None
    return _numbers(_rounded(found, dtype))


def scale_of(eqn: JaxprEqn, operands: Sequence[Value]) -> float:
    """By what constants a result was multiplied, one directly after the other."""
    if eqn.primitive.name != "mul":
        return 1.0
    every = [value.traits.constants for value in operands]
    constants = [abs(n) for numbers in every if numbers for n in numbers]
    scaled = [value.traits.scale for value in operands if not value.follows]
    scale = math.prod([*constants, *scaled])
    # A key of caches has to equal itself, as NaN does not.
    known = len(constants) == len(scaled) == 1 and math.isfinite(scale)
    return scale if known else 1.0


def overscaled(eqn: JaxprEqn, operands: Sequence[Value], dtype: DType) -> bool:
    """Whether what multiplies one directly after the other leaves a dtype's range.

    XLA multiplies such constants with each other first.
    """
    chained = any(value.traits.scale != 1 for value in operands)
    return chained and not in_range(scale_of(eqn, operands), dtype)


class Carried(NamedTuple):
    """Of what a loop carries, one that a sum comes from."""

    loop: int  # which of those that it stands in, from the outermost
    place: int  # in the carry
    added: bool  # whether the loop has added to it since


class Traits(NamedTuple):
    """What is known of a value beside its dtype; hashable, so that it keys caches."""

    # If it is derived from constants alone, their numbers: it follows others' dtype.
    constants: Numbers | None = None
    # The dimensions along which broadcasting or inserting them repeats it.
    repeated: tuple[int, ...] = ()
    # If it is the direct result of a lowered product, those along which a bias varies,
    # once for each weight in the product.
    bias_dims: tuple[tuple[int, ...], ...] = ()
    # Whether it came in 16 bits, or has a lowered product among its ancestors: then it
    # is no weight.
    activation: bool = False
    # Of a probability, the names of the sigmoid, softmax or the like that gave it.
    probability: frozenset[str] = frozenset()
    rounded_to: DType | None = None  # the 16-bit dtype that such a probability has had
    table: bool = False  # whether it is made of iota and literals alone
    # By what constants it was multiplied, one directly after the other.
    scale: float = 1.0
    # The 16-bit dtype that readers see of a loop's sum, which is kept in float32; and
    # which of what the loop carries it comes from.
    sum_dtype: DType | None = None
    origins: frozenset[Carried] = frozenset()


class Value:
    """An array of a program that is planned, in the dtype that it has by now."""

    __slots__ = "aval array cast_from casts dtype eligible number slot traits".split()

    def __init__(
        self,
        aval: Any,
        traits: Traits | None = None,
        *,
        slot: int | None = None,
        array: Any = None,
    ):
        # Two values of which different things are known may be one array: one number.
        self.number = next(_ids)
        self.aval = aval  # as traced, in the dtype that it is computed in
        # None for what has none, as a token.
        self.dtype: DType = getattr(aval, "dtype", None)  # type: ignore[assignment]
        # Whether autocast may cast it. A reference holds floats and is none.
        self.eligible = is_plain_array(aval) and _dtypes.eligible(self.dtype)
        self.traits = traits or Traits()
        if self.traits.probability and self.low:
            self.traits = self.traits._replace(rounded_to=self.dtype)
        self.casts: dict[DType, Value] = {}  # the array in other dtypes
        # Which input of an inner program it is, if casts are left to the caller.
        self.slot = slot
        self.array = array  # the array itself, if it is a constant of the program
        self.cast_from: Value | None = None  # what it was cast from, if in float32

    def __repr__(self) -> str:
        number = self.constant if self.follows else None
        constant = "" if number is None else f"={number:g}"
        shape = ",".join(map(str, shape_of(self)))
        return f"%{self.number}{constant}:{self.dtype}[{shape}]"

    @classmethod
    def of(cls, aval: Any, dtype: Any, traits: Traits | None = None) -> Value:
        """A value like one of the traced program, in a dtype of its own."""
        return cls(_dtypes.in_dtype(aval, dtype), traits)

    @classmethod
    def literal(cls, literal: Any) -> Value:
        traits = Traits(_numbers(literal.val), table=literal.aval.ndim == 0)
        # Python's bools have no dtype; its other numbers in a program are JAX's own.
        is_bool = isinstance(literal.val, bool)
        array = np.bool_(literal.val) if is_bool else literal.val
        return cls(literal.aval, traits, array=array)

    def knowing(self, **traits: Any) -> Value:
        """The same array, of which something else is known."""
        known = self.traits._replace(**traits)
        other = Value(self.aval, known, slot=self.slot, array=self.array)
        other.number, other.casts = self.number, self.casts
        other.cast_from = self.cast_from
        return other

    @property
    def kept(self) -> Value:
        """What programs hand on: of a loop's sum the float32 that it is kept in."""
        known = self.traits
        if known.sum_dtype is None or self.is_kept:
            return self
        wide = self.casts[_dtypes.FLOAT32]
        return wide.knowing(sum_dtype=known.sum_dtype, origins=known.origins)

    @property
    def handed_over(self) -> Value:
        """What a program outside of the loop knows: not that its 16 bits are a sum."""
        if self.traits.sum_dtype is None or self.is_kept:
            return self
        return self.knowing(sum_dtype=None, origins=frozenset())

    @property
    def is_kept(self) -> bool:
        return self.traits.sum_dtype is not None and self.dtype == _dtypes.FLOAT32

    @property
    def adds(self) -> bool:
        """Whether it is a loop's sum, kept in float32, to which the loop has added."""
        return self.is_kept and any(origin.added for origin in self.traits.origins)

    def seen(self, narrow: Value, origins: frozenset[Carried]) -> Value:
        """What readers see of a sum that is kept; those in float32 see the sum."""
        plain = self.knowing(sum_dtype=None, origins=frozenset())
        narrow.casts[_dtypes.FLOAT32] = plain
        return narrow.knowing(sum_dtype=narrow.dtype, origins=origins)

    def as_read(self, round_to: Callable[[Value, DType], Value]) -> Value:
        """What readers have of it: of a loop's sum in float32 the 16 bits."""
        low = self.traits.sum_dtype
        if low is None or not self.is_kept:
            return self
        return self.seen(round_to(self, low), self.traits.origins)

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
        return self.traits.constants is not None

    @property
    def constant(self) -> float | None:
        """The number it stands for, if it is a scalar known before the program runs."""
        found = self.traits.constants or ()
        if self.ndim > 0 or len(found) != 1:
            return None
        [number] = found
        # A zero that was computed may be the negative one.
        return number if number != 0 or self.array is not None else None

    def constant_in(self, dtype: DType) -> Value:
        number = np.asarray(self.constant).astype(dtype)[()]
        return Value(_dtypes.in_dtype(self.aval, dtype), self.traits, array=number)


Values = Sequence[Value]
