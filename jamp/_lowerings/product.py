"""Matrix products of 16-bit arrays, and what they become on CPUs."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, LOW_DTYPES, DType, size_of
from jamp._lowerings.bilinear import PRECISION, Taken, define
from jamp._lowerings.processor import this_processor
from jamp._lowerings.releases import KEEPS_BARRIERS, ROUNDS_PRODUCTS

# Of fewer multiplications XLA writes bfloat16 more slowly than float32, to be rounded.
_ROUNDED_FROM = 2**26
# With AMX, so it does where more numbers are added up to one. Of a result so many times
# as wide as what it is of, one in float32 would take most of the memory.
_MOST_ADDED = 256
_WIDE = 8
# A matrix is cast for as many rows more slowly than it is multiplied in float32, or for
# more if it is small.
_UNCAST_ROWS, _UNCAST_ROWS_OF_FEW = 12, 24
_FEW_NUMBERS, _FEW_OF_EACH = 2**18, 2**11  # of each matrix in a stack
# With more rows, or a smaller matrix, float32 is worth the casts of the operands.
_FEW_ROWS = 32
_LARGE = 2**20
# To read a number of float32 across takes as long as to move so many of 16 bits.
_ACROSS = 4
# Of stacks with fewer multiplications in each, XLA makes loops up to JAX 0.11.0.
_LOOPED_BELOW = 2**9

Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


def _product_on_cpu(lhs: Any, rhs: Any, taken: Taken, params: dict[str, Any]) -> Any:
    dims, to = params["dimension_numbers"], params["preferred_element_type"]
    sharding = params["out_sharding"]
    weights = {*taken.late} & {*params["weights"]}
    if taken.whole and any(_reads_as_is(at, lhs, rhs, **params) for at in weights):
        lhs, rhs = (lax.convert_element_type(a, FLOAT32) for a in taken.wide)
        multiply = partial(_by_xla, to=to, out_sharding=sharding, in_float32=True)
        if sharding is None:
            return _in_best_order(*_factors(lhs, rhs, dims), multiply)
        return multiply(lhs, rhs, dims)
    if taken.whole and sharding is None:
        return multiply_on_cpu(lhs, rhs, dims, to)
    fast = lhs.dtype == BFLOAT16 and this_processor().has_fast_products
    if fast and not _is_looped(*_factors(lhs, rhs, dims)):
        return _by_instructions(lhs, rhs, dims, to, sharding, whole=False)
    # Of sharded operands XLA would send float32 copies. It has no loop for 16 bits that
    # gives float32.
    return _by_xla(lhs, rhs, dims, to, sharding, in_float32=to == FLOAT32)


def multiply_on_cpu(lhs: Any, rhs: Any, dims: DimensionNumbers, to: DType) -> Any:
    """A product of 16-bit arrays, added up in float32, as is fastest on this processor.

    The arrays are on one device.
    """
    processor = this_processor()
    factors = _factors(lhs, rhs, dims)
    fast = lhs.dtype == BFLOAT16 and processor.has_fast_products
    if fast and not _is_slow(*factors):
        return _in_two_rows(*factors, to)
    # Multiplied and summed in float32: the same product, without a loop that takes its
    # operands apart one by one.
    slow = lhs.dtype == FLOAT16 or fast or processor.gains is False
    wide = to == FLOAT32 or (slow and lhs.dtype in LOW_DTYPES)
    multiply = partial(_by_xla, to=to, out_sharding=None, in_float32=wide)
    if not wide:
        return multiply(lhs, rhs, dims)
    return _in_best_order(*factors, multiply)


def _by_xla(
    lhs: Any,
    rhs: Any,
    dims: DimensionNumbers,
    to: DType,
    out_sharding: Any,
    *,
    in_float32: bool,
) -> Any:
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=lax.DotAlgorithmPreset.F32_F32_F32 if in_float32 else PRECISION,
        preferred_element_type=to,
        out_sharding=out_sharding,
    )


class _Factor(NamedTuple):
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
        return _size(self.array, self.free)

    @property
    def size(self) -> float:
        return _size(self.array, range(self.array.ndim))

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


def _factors(lhs: Any, rhs: Any, dims: DimensionNumbers) -> tuple[_Factor, _Factor]:
    left, right = (
        _Factor(array, added, batch, _others(array.ndim, added, batch))
        for array, added, batch in zip((lhs, rhs), *dims, strict=True)
    )
    return left, right


def _reads_as_is(
    place: int,
    lhs: Any,
    rhs: Any,
    *,
    dtype: DType,
    dimension_numbers: DimensionNumbers,
    **params: Any,
) -> bool:
    """Whether a matrix of float32 is worth no cast for this product alone.

    So it is if it meets few rows, or if the product is in float32 anyway. One that XLA
    has to transpose it writes out anyway, which in 16 bits is half as much.
    """
    processor = this_processor()
    if dtype != BFLOAT16 or not processor.of_x86:
        return False
    factors = _factors(lhs, rhs, dimension_numbers)
    if not processor.has_fast_products or _is_slow(*factors):
        return True
    matrix, rows = factors[place], factors[1 - place].rows
    first = matrix.batch == tuple(range(len(matrix.batch)))
    as_it_is = first and 0 in (matrix.moved_on_the_left, matrix.moved_on_the_right)
    few = matrix.size <= _FEW_NUMBERS
    return as_it_is and rows <= (_UNCAST_ROWS_OF_FEW if few else _UNCAST_ROWS)


def _is_slow(left: _Factor, right: _Factor) -> bool:
    """Whether float32 is faster than the instructions for bfloat16 that there are.

    So it is where nothing is added up, which XLA does element by element, for a row and
    what stays in the cache, and on some processors where casts take little time.
    """
    if _size(left.array, left.added) == 1 or _is_looped(left, right):
        return True
    size, stack = max(left.size, right.size), _size(left.array, left.batch)
    few = size <= _FEW_NUMBERS or size < _FEW_OF_EACH * stack
    if few and 1 in (left.rows, right.rows):
        return True
    many = min(left.rows, right.rows) > _FEW_ROWS
    return this_processor().is_held_back and (many or size < _LARGE)


def _is_looped(left: _Factor, right: _Factor) -> bool:
    """Whether XLA makes a loop of a stack of small matrices.

    It ends the process where it has found a transposed result better, which it can't
    write so; the barriers behind products by instructions keep that from going away.
    """
    multiplications = _size(left.array, left.added) * left.rows * right.rows
    return bool(left.batch) and not KEEPS_BARRIERS and multiplications < _LOOPED_BELOW


def _in_two_rows(left: _Factor, right: _Factor, to: DType) -> Any:
    """A product by instructions, of a single row as of two.

    XLA multiplies a row and a matrix of bfloat16 in float32, for which it writes out
    the matrix.
    """
    single = [factor.rows == 1 for factor in (left, right)]
    if all(single) or not any(single):
        multiply = partial(_by_instructions, to=to, out_sharding=None)
        return _in_best_order(left, right, multiply, fast=True)
    row, matrix = (left, right) if single[0] else (right, left)
    result = _row_by_matrix(row, matrix, to)
    at = len(row.batch) if single[0] else result.ndim
    return lax.expand_dims(result, range(at, at + len(row.free)))


def _in_best_order(
    left: _Factor, right: _Factor, multiply: Callable[..., Any], *, fast: bool = False
) -> Any:
    """A product with its operands swapped, if that moves fewer numbers.

    The result is moved then, or what reads that of a single product reads it across.
    """

    def product(left: _Factor, right: _Factor) -> Any:
        numbers = (left.added, right.added), (left.batch, right.batch)
        return multiply(left.array, right.array, numbers)

    batches = len(left.batch)
    size = _size(left.array, left.batch) * left.rows * right.rows
    swapped = _moved(right, left, fast=fast) + (size if batches else _ACROSS * size)
    if swapped >= _moved(left, right, fast=fast):
        return product(left, right)
    result = product(right, left)
    first = batches + len(right.free)
    order = [*range(batches), *range(first, result.ndim), *range(batches, first)]
    return lax.transpose(result, order)


def _moved(left: _Factor, right: _Factor, *, fast: bool) -> float:
    """How many numbers XLA moves for a product that may go by instructions.

    It has no fast path for stacks of matrices in which the contracted dimension is not
    the last of the left operand and the first of the right: it transposes these. Of
    single matrices it transposes the left for instructions.
    """
    if left.batch:
        return left.moved_on_the_left + right.moved_on_the_right
    if not fast:
        return 0
    return left.moved_on_the_left + min(
        right.moved_on_the_left, right.moved_on_the_right
    )


def _row_by_matrix(row: _Factor, matrix: _Factor, to: DType) -> Any:
    """The product of a single row and a matrix, without the dimensions of the row.

    A matrix whose rows are added up is taken as two of half as many.
    """
    start = len(row.batch)
    array = lax.transpose(row.array, (*row.batch, *row.free, *row.added))
    array = lax.squeeze(array, range(start, start + len(row.free)))
    if not start and matrix.added == (0,) and array.size % 2 == 0:
        whole = array, matrix.array
        halves = [a.reshape(2, a.shape[0] // 2, *a.shape[1:]) for a in whole]
        row, matrix = (_Factor(a, (1,), (0,), range(2, a.ndim)) for a in halves)
        both = _row_by_matrix(row, matrix, FLOAT32)
        return lax.convert_element_type(both[0] + both[1], to)
    rows = jnp.stack([array, array], start)
    added = tuple(range(start + 1, rows.ndim))
    numbers = (added, matrix.added), (tuple(range(start)), matrix.batch)
    both = _by_instructions(rows, matrix.array, numbers, to, None)
    return lax.index_in_dim(both, 0, start, keepdims=False)


def _by_instructions(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    to: DType,
    out_sharding: Any,
    *,
    whole: bool = True,
) -> Any:
    """A product of bfloat16 arrays by fast instructions.

    XLA takes them only where the contracted dimension of the left operand is its last,
    in memory too. With a dimension of size one more it transposes one in which it is
    not, instead of failing, going through a loop or multiplying in float32.
    """
    (left, right), batch = dimension_numbers
    rounded = to == BFLOAT16 and _rounds(lhs, rhs, dimension_numbers)
    last = left == (lhs.ndim - 1,)
    across = right == (rhs.ndim - 1,) and not batch[0]
    if whole and last and (across or not KEEPS_BARRIERS):
        # For such a dimension it would transpose a right one that it reads across, and,
        # where it drops barriers early, copy the left one.
        lhs, rhs = _in_order(lhs), _in_order(rhs)
    # Of arrays on several devices it would send more.
    elif whole or (len(left) == 1 and not last):
        lhs, rhs = (lax.expand_dims(array, (0,)) for array in (lhs, rhs))
        added = (*_behind_one(left), 0), (*_behind_one(right), 0)
        dimension_numbers = added, (_behind_one(batch[0]), _behind_one(batch[1]))
    # Nor may XLA swallow a transpose in front, as one that it makes of cumsum, nor one
    # behind, for which it would swap the operands.
    result = lax.dot_general(
        lax.optimization_barrier(lhs),
        rhs,
        dimension_numbers,
        precision=PRECISION,
        preferred_element_type=to if rounded else FLOAT32,
        out_sharding=out_sharding,
    )
    return lax.convert_element_type(lax.optimization_barrier(result), to)


def _behind_one(dims: Dims) -> Dims:
    return tuple(d + 1 for d in dims)


def _in_order(array: Any) -> Any:
    """The same array, whose elements XLA takes to lie in the order of its dimensions.

    It takes those of a transpose to lie as they did, and so for what is computed from
    one element by element. It takes new dimensions of bits for what they are, until it
    drops them again.
    """
    bits = lax.bitcast_convert_type(array, jnp.uint16)
    one_more = lax.bitcast_convert_type(lax.expand_dims(bits, (0,)), array.dtype)
    return lax.squeeze(one_more, (0,))


def _rounds(lhs: Any, rhs: Any, dims: DimensionNumbers) -> bool:
    """Whether XLA is to write a product in bfloat16, instead of float32 to be rounded.

    Sizes that are not known count as large.
    """
    left, right = _factors(lhs, rhs, dims)
    free, added = right.rows, _size(rhs, right.added)
    if not ROUNDS_PRODUCTS or left.size * free < _ROUNDED_FROM:
        return False
    return not this_processor().has_amx or added <= _MOST_ADDED or free >= _WIDE * added


def _size(array: Any, dims: Iterable[int]) -> float:
    size = size_of(array.shape[d] for d in dims)
    return math.inf if size is None else size


def _others(ndim: int, *dims: Sequence[int]) -> Dims:
    taken = {d for some in dims for d in some}
    return tuple(d for d in range(ndim) if d not in taken)


def _gradient(place: int, cotangent: Any, *factors: Any, **params: Any) -> Any:
    """The cotangent of one operand, in its dtype: a product with the other operand.

    The factors stand in the order in which the result needs no transpose, if there is
    one: XLA would swap them, into a layout without a fast path.
    """
    wanted, other = factors[place], factors[1 - place]
    aval, sides = wanted.aval, [*zip(*params["dimension_numbers"], strict=True)]
    own, others = reversed(sides) if place else sides
    (contracting, batch), (other_contracting, other_batch) = own, others
    kept = _others(aval.ndim, contracting, batch)
    other_kept = _others(other.ndim, other_contracting, other_batch)
    start = len(batch) + (0 if place else len(kept))
    in_cotangent = tuple(range(start, start + len(other_kept)))
    batched = tuple(range(len(batch)))
    contracted = [contracting[i] for i in np.argsort(other_contracting)]
    cotangent_first = [*batch, *kept, *contracted]
    other_first = [*batch, *contracted, *kept]
    if other_first == sorted(other_first) != cotangent_first:
        numbers = (other_kept, in_cotangent), (tuple(other_batch), batched)
        factors, order = (other, cotangent), other_first
    else:
        numbers = (in_cotangent, other_kept), (batched, tuple(other_batch))
        factors, order = (cotangent, other), cotangent_first
    params = {
        **params,
        "dimension_numbers": numbers,
        "preferred_element_type": aval.dtype,
        "out_sharding": _sharding_in(aval, order),
    }
    result = product_p.bind(*factors, **params)
    return lax.transpose(result, np.argsort(order))


def _sharding_in(aval: Any, order: Sequence[int]) -> Any:
    """An array's sharding with its dimensions in another order, if types have one."""
    sharding = aval.sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    spec = sharding.spec
    # Also of one that is to be added up over devices, or has been.
    partitions = [*spec.partitions, *(None for _ in range(aval.ndim - len(spec)))]
    return sharding.update(spec=spec.update(tuple(partitions[d] for d in order)))


product_p, product_of_weights_p = define(
    lax.dot_general_p, _product_on_cpu, _gradient, _reads_as_is
)
