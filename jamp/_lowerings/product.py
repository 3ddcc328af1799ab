"""Matrix products of 16-bit arrays, and what they become on CPUs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, LOW_DTYPES, DType
from jamp._lowerings.bilinear import PRECISION, Taken, define
from jamp._lowerings.factors import (
    DimensionNumbers,
    Dims,
    Factor,
    factors_of,
    remaining,
    size_along,
)
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


def _product_on_cpu(lhs: Any, rhs: Any, taken: Taken, params: dict[str, Any]) -> Any:
    dims, to = params["dimension_numbers"], params["preferred_element_type"]
    sharding = params["out_sharding"]
    weights = {*taken.late} & {*params["weights"]}
    as_is = bool(taken.late) and _is_in_float32(lhs, rhs, **params)
    as_is |= any(_reads_as_is(at, lhs, rhs, **params) for at in weights)
    if taken.whole and as_is:
        lhs, rhs = (lax.convert_element_type(a, FLOAT32) for a in taken.wide)
        multiply = partial(_by_xla, to=to, out_sharding=sharding, in_float32=True)
        if sharding is None:
            return _in_best_order(*factors_of(lhs, rhs, dims), multiply)
        return multiply(lhs, rhs, dims)
    if taken.whole and sharding is None:
        return multiply_on_cpu(lhs, rhs, dims, to)
    fast = lhs.dtype == BFLOAT16 and this_processor().has_fast_products
    if fast and not _is_looped(*factors_of(lhs, rhs, dims)):
        return _by_instructions(lhs, rhs, dims, to, sharding, whole=False)
    # Of sharded operands XLA would send float32 copies. It has no loop for 16 bits that
    # gives float32.
    return _by_xla(lhs, rhs, dims, to, sharding, in_float32=to == FLOAT32)


def multiply_on_cpu(lhs: Any, rhs: Any, dims: DimensionNumbers, to: DType) -> Any:
    """A product of 16-bit arrays, added up in float32, as is fastest on this processor.

    The arrays are on one device.
    """
    processor = this_processor()
    factors = factors_of(lhs, rhs, dims)
    fast = lhs.dtype == BFLOAT16 and processor.has_fast_products
    if fast and not _is_slow(*factors):
        return _in_two_rows(*factors, to)
    # Multiplied and summed in float32: the same product, without a loop that takes its
    # operands apart one by one.
    slow = lhs.dtype == FLOAT16 or fast or processor.gains is False
    in_float32 = to == FLOAT32 or (slow and lhs.dtype in LOW_DTYPES)
    multiply = partial(_by_xla, to=to, out_sharding=None, in_float32=in_float32)
    if not in_float32:
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
    if _is_in_float32(lhs, rhs, dtype=dtype, dimension_numbers=dimension_numbers):
        return True
    factors = factors_of(lhs, rhs, dimension_numbers)
    matrix, rows = factors[place], factors[1 - place].rows
    first = matrix.batch == tuple(range(len(matrix.batch)))
    as_it_is = first and 0 in (matrix.moved_on_the_left, matrix.moved_on_the_right)
    few = matrix.size <= _FEW_NUMBERS
    return as_it_is and rows <= (_UNCAST_ROWS_OF_FEW if few else _UNCAST_ROWS)


def _is_in_float32(
    lhs: Any,
    rhs: Any,
    *,
    dtype: DType,
    dimension_numbers: DimensionNumbers,
    **params: Any,
) -> bool:
    """Whether a product of bfloat16 arrays on one device is in float32.

    One of float16 keeps what it overflows to.
    """
    processor = this_processor()
    if dtype != BFLOAT16 or not processor.of_x86:
        return False
    slow = _is_slow(*factors_of(lhs, rhs, dimension_numbers))
    return slow or not processor.has_fast_products


def _is_slow(left: Factor, right: Factor) -> bool:
    """Whether float32 is faster than the instructions for bfloat16 that there are.

    So it is where nothing is added up, which XLA does element by element, for a row and
    what stays in the cache, and on some processors where casts take little time.
    """
    if size_along(left.array, left.added) == 1 or _is_looped(left, right):
        return True
    size, stack = max(left.size, right.size), size_along(left.array, left.batch)
    few = size <= _FEW_NUMBERS or size < _FEW_OF_EACH * stack
    if few and 1 in (left.rows, right.rows):
        return True
    many = min(left.rows, right.rows) > _FEW_ROWS
    return this_processor().is_held_back and (many or size < _LARGE)


def _is_looped(left: Factor, right: Factor) -> bool:
    """Whether XLA makes a loop of a stack of small matrices.

    XLA ends the process if it picks a transposed layout for the result of such a loop,
    which it can't write. Barriers behind products by instructions keep transposes that
    would else be simplified away.
    """
    multiplications = size_along(left.array, left.added) * left.rows * right.rows
    return bool(left.batch) and not KEEPS_BARRIERS and multiplications < _LOOPED_BELOW


def _in_two_rows(left: Factor, right: Factor, to: DType) -> Any:
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
    left: Factor, right: Factor, multiply: Callable[..., Any], *, fast: bool = False
) -> Any:
    """A product with its operands swapped, if that moves fewer numbers.

    The result is moved then, or what reads that of a single product reads it across.
    """

    def product(left: Factor, right: Factor) -> Any:
        numbers = (left.added, right.added), (left.batch, right.batch)
        return multiply(left.array, right.array, numbers)

    batches = len(left.batch)
    size = size_along(left.array, left.batch) * left.rows * right.rows
    swapped = _copied(right, left, fast=fast) + (size if batches else _ACROSS * size)
    if swapped >= _copied(left, right, fast=fast):
        return product(left, right)
    result = product(right, left)
    first = batches + len(right.free)
    order = [*range(batches), *range(first, result.ndim), *range(batches, first)]
    return lax.transpose(result, order)


def _copied(left: Factor, right: Factor, *, fast: bool) -> float:
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


def _row_by_matrix(row: Factor, matrix: Factor, to: DType) -> Any:
    """The product of a single row and a matrix, without the dimensions of the row.

    A matrix whose rows are added up is taken as two of half as many.
    """
    start = len(row.batch)
    array = lax.transpose(row.array, (*row.batch, *row.free, *row.added))
    array = lax.squeeze(array, range(start, start + len(row.free)))
    if not start and matrix.added == (0,) and array.size % 2 == 0:
        whole = array, matrix.array
        halves = [a.reshape(2, a.shape[0] // 2, *a.shape[1:]) for a in whole]
        row, matrix = (Factor(a, (1,), (0,), range(2, a.ndim)) for a in halves)
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
    left, right = factors_of(lhs, rhs, dims)
    free, added = right.rows, size_along(rhs, right.added)
    if not ROUNDS_PRODUCTS or left.size * free < _ROUNDED_FROM:
        return False
    return not this_processor().has_amx or added <= _MOST_ADDED or free >= _WIDE * added


def _gradient(place: int, cotangent: Any, *factors: Any, **params: Any) -> Any:
    """The cotangent of one operand, in its dtype: a product with the other operand.

    The factors stand in the order in which the result needs no transpose, if there is
    one: XLA would swap them, into a layout without a fast path.
    """
    wanted, other = factors[place], factors[1 - place]
    aval, sides = wanted.aval, [*zip(*params["dimension_numbers"], strict=True)]
    own, others = reversed(sides) if place else sides
    (contracting, batch), (other_contracting, other_batch) = own, others
    kept = remaining(aval.ndim, contracting, batch)
    other_kept = remaining(other.ndim, other_contracting, other_batch)
    start = len(batch) + (0 if place else len(kept))
    in_cotangent = tuple(range(start, start + len(other_kept)))
    batched = tuple(range(len(batch)))
    contracted = [contracting[i] for i in np.argsort(other_contracting)]
    cotangent_first = [*batch, *kept, *contracted]
    other_first = [*batch, *contracted, *kept]
    if other_first == sorted(other_first) != cotangent_first:
        numbers = (other_kept, in_cotangent), (tuple(other_batch), batched)
        factors, order, rounded = (other, cotangent), other_first, (1,)
    else:
        numbers = (in_cotangent, other_kept), (batched, tuple(other_batch))
        factors, order, rounded = (cotangent, other), cotangent_first, (0,)
    # What was saved in 16 bits is read so where many products are in float32: it takes
    # half the memory.
    both = 1 - place in params["rounded"] and this_processor().gains
    params = {
        **params,
        "rounded": (0, 1) if both else rounded,
        "dimension_numbers": numbers,
        "preferred_element_type": aval.dtype,
        "out_sharding": _sharding_in(aval, order),
    }
    result = product_p.bind(*factors, **params)
    return lax.transpose(result, np.argsort(order))


def _sharding_in(aval: Any, order: Sequence[int]) -> Any:
    """An array's sharding with its dimensions in another order, if types have one."""
    sharding = aval.sharding
    if sharding.mesh.empty:
        # A weight that is on no mesh has a gradient that is whole on the one at hand.
        mesh = get_abstract_mesh()
        whole = NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
        return whole if mesh.explicit_axes else None
    if not sharding.mesh.explicit_axes:
        return None
    spec = sharding.spec
    # Also of one that is to be added up over devices, or has been.
    partitions = [*spec.partitions, *(None for _ in range(aval.ndim - len(spec)))]
    return sharding.update(spec=spec.update(tuple(partitions[d] for d in order)))


product_p, product_of_weights_p = define(
    lax.dot_general_p, _product_on_cpu, _gradient, _reads_as_is, _is_in_float32
)
