"""Values of the running program, with what the rules need to know about them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jamp import _constants, _dtypes
from jamp._compat import is_plain_array
from jamp._constants import Interval
from jamp._dtypes import DType


class Traits(NamedTuple):
    """What is known of a value beside its array; hashable, so that it keys caches.

    Attributes:
      interval: bounds, if the value is weak (derived from constants alone).
      rank: its rank before broadcasting and the insertion of unit dimensions.
      product: whether it is the direct result of a lowered matmul or convolution.
      probability: whether it is the result of a sigmoid, a softmax or the like.
      rounded: the 16-bit dtype to which such a probability was rounded.
    """

    interval: Interval | None = None
    rank: int = 0
    product: bool = False
    probability: bool = False
    rounded: DType | None = None


class Value:
    """One value: its array, its traits, and the casts made of it so far.

    Attributes:
      array: the array, tracer or literal in the dtype it was computed in.
      aval: its abstract value.
      dtype: the dtype it was computed in; None for what has none, as a token.
      eligible: whether autocast may cast it.
      traits: what else is known of it.
      casts: the array in other dtypes.
      prepared: casts that were made with it and count once they are used.
      slot: the position among the inputs of the inner program being rewritten.
    """

    __slots__ = (
        "array",
        "aval",
        "casts",
        "dtype",
        "eligible",
        "prepared",
        "slot",
        "traits",
    )

    def __init__(self, array: Any, aval: Any, traits: Traits, slot: int | None = None):
        self.array = array
        self.aval = aval
        dtype: Any = getattr(aval, "dtype", None)
        self.dtype: _dtypes.DType = dtype
        # A reference holds floats and is none.
        self.eligible = is_plain_array(aval) and _dtypes.eligible(self.dtype)
        self.traits = traits
        self.casts: dict[DType, Any] = {}
        self.prepared: dict[DType, Any] = {}
        self.slot = slot

    @classmethod
    def of(cls, array: Any) -> Value:
        """A value about which nothing is known."""
        aval = jax.typeof(array)
        return cls(array, aval, Traits(rank=getattr(aval, "ndim", 0)))

    @classmethod
    def literal(cls, literal: Any) -> Value:
        """A literal of the program."""
        interval = _constants.of_array(literal.val)
        return cls(literal.val, literal.aval, Traits(interval, literal.aval.ndim))

    @property
    def ndim(self) -> int:
        """Its rank."""
        return self.aval.ndim  # type: ignore[no-any-return]

    @property
    def weak(self) -> bool:
        """Whether it takes the dtype of the operands beside it."""
        return self.traits.interval is not None

    @property
    def constant(self) -> float | None:
        """The number it stands for, if it is a scalar known before the program runs."""
        interval = self.traits.interval
        if interval is None or self.ndim > 0 or interval.low != interval.high:
            return None
        return interval.low
