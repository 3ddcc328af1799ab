"""Values of a program being planned: their dtypes, and what else is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from jamp import _dtypes
from jamp._compat import is_plain_array
from jamp._dtypes import DType
from jamp._plan import intervals
from jamp._plan.intervals import Interval

_numbers = count()


class Traits(NamedTuple):
    """What is known of a value beside its dtype; hashable, so that it keys caches."""

    # Bounds, if the value follows the dtype of others, because it is derived from
    # constants alone.
    interval: Interval | None = None
    rank: int = 0  # its rank before broadcasting and the insertion of unit dimensions
    # Whether it is the direct result of a lowered matmul or convolution.
    product: bool = False
    # Whether it is the result of a sigmoid, a softmax or the like.
    probability: bool = False
    # The 16-bit dtype to which such a probability was rounded.
    rounded: DType | None = None


class Value:
    """One array of the program that a plan describes."""

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
        # The position among the inputs of an inner program whose narrowing casts are
        # left to the caller.
        self.slot = slot
        self.known = known  # the array itself, if it is a constant of the program

    @classmethod
    def of(cls, aval: Any, dtype: Any, traits: Traits | None = None) -> Value:
        """A value like one of the traced program, in a dtype of its own."""
        return cls(_dtypes.in_dtype(aval, dtype), traits)

    @classmethod
    def literal(cls, literal: Any) -> Value:
        traits = Traits(intervals.of_array(literal.val), literal.aval.ndim)
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
        """That number in a dtype."""
        number = np.asarray(self.constant).astype(dtype)[()]
        aval = _dtypes.in_dtype(self.aval, dtype)
        return Value(aval, self.traits, known=number)


Values = Sequence[Value]
