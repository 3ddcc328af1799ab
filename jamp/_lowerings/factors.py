"""The operands of a matrix product, and what their dimensions are to it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jamp._dtypes import size_of

Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


class Factor(NamedTuple):
    """An operand of a product.

    Attributes:
      array: the operand.
      added: its contracted dimensions.
      batch: those that both operands have.
      free: the others, which count its rows.
    """

    array: Any
    added: Dims
    batch: Dims
    free: Sequence[int]

    @property
    def rows(self) -> float:
        return size_along(self.array, self.free)

    @property
    def size(self) -> float:
        return size_along(self.array, range(self.array.ndim))

    @property
    def moved_on_the_left(self) -> float:
        """How many numbers are moved if the contracted dimensions have to come last."""
        return self._moved(self.free, self.added)

    @property
    def moved_on_the_right(self) -> float:
        """The same if they have to come first."""
        return self._moved(self.added, self.free)

    def _moved(self, first: Sequence[int], last: Sequence[int]) -> float:
        if max(first, default=-1) < min(last, default=self.array.ndim):
            return 0
        return self.size


def factors_of(lhs: Any, rhs: Any, dims: DimensionNumbers) -> tuple[Factor, Factor]:
    left, right = (
        Factor(array, added, batch, remaining(array.ndim, added, batch))
        for array, added, batch in zip((lhs, rhs), *dims, strict=True)
    )
    return left, right


def size_along(array: Any, dims: Iterable[int]) -> float:
    size = size_of(array.shape[d] for d in dims)
    return math.inf if size is None else size


def remaining(ndim: int, *dims: Sequence[int]) -> Dims:
    taken = {d for some in dims for d in some}
    return tuple(d for d in range(ndim) if d not in taken)
