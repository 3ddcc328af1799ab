"""Matrix products of 16-bit arrays, and what they become on CPUs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from jamp._lowerings.bilinear import PRECISION, define
from jamp._lowerings.processor import (
    ROUNDS_PRODUCTS,
    has_amx,
    has_fast_products,
    multiplies_bfloat16,
)

# Of fewer multiplications XLA writes bfloat16 more slowly than float32, to be rounded.
_ROUNDED_FROM = 2**26
# With AMX, so it does where more numbers are added up to one. Of a result so many times
# as wide as what it is of, one in float32 would take most of the memory.
_MOST_ADDED = 256
_WIDE = 8

Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


def _product_on_cpu(lhs: Any, rhs: Any, wide: Any, params: dict[str, Any]) -> Any:
    numbers, to = params["dimension_numbers"], params["preferred_element_type"]
    if lhs.dtype == BFLOAT16 and has_fast_products():
        transposed, sharding = params["transposed"], params["out_sharding"]
        return multiply_on_cpu(lhs, rhs, numbers, to, sharding, transposed=transposed)
    # Multiplied and summed in float32: the same product, without a loop that takes its
    # operands apart one by one. XLA has none of 16 bits that gives float32 elsewhere.
    slow = lhs.dtype == FLOAT16 or multiplies_bfloat16() is False
    # Of sharded operands XLA would send float32 copies.
    in_float32 = to == FLOAT32 or (slow and jax.device_count() == 1)
    return lax.dot_general(
        lhs,
        rhs,
        numbers,
        precision=lax.DotAlgorithmPreset.F32_F32_F32 if in_float32 else PRECISION,
        preferred_element_type=to,
        out_sharding=params["out_sharding"],
    )


def multiply_on_cpu(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    to: DType,
    out_sharding: Any = None,
    *,
    transposed: bool = False,
) -> Any:
    """A product of bfloat16 arrays, added up in float32, by fast instructions.

    XLA takes them only where the contracted dimension of the left operand is its last.
    It transposes one that is not, instead of failing or going through a loop, if the
    operands have a dimension of size one more. So it does with a cotangent that was
    transposed on the way, as in attention: a stack of matrices that is multiplied with
    it would be in float32.
    """
    (left, right), batch = dimension_numbers
    inner = len(left) == 1 and left[0] < lhs.ndim - 1
    if inner or (transposed and _are_matrices(lhs, rhs, dimension_numbers)):
        dimension_numbers = ((*left, lhs.ndim), (*right, rhs.ndim)), batch
        lhs, rhs = (lax.expand_dims(array, (array.ndim,)) for array in (lhs, rhs))
    rounded = to == BFLOAT16 and _rounds(lhs, rhs, dimension_numbers)
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


def _are_matrices(lhs: Any, rhs: Any, dims: DimensionNumbers) -> bool:
    """Whether this is a stack of products of matrices, each as it is."""
    (left, right), (left_batch, right_batch) = dims
    stacked = lhs.ndim > 2 and left_batch == right_batch == tuple(range(lhs.ndim - 2))
    return stacked and left == (lhs.ndim - 1,) and right == (rhs.ndim - 2,)


def _rounds(lhs: Any, rhs: Any, dims: DimensionNumbers) -> bool:
    """Whether XLA is to write a product in bfloat16, instead of float32 to be rounded.

    Sizes that are not known count as large.
    """
    (_, right), (_, batch) = dims
    free = _size(rhs, _others(rhs.ndim, right, batch))
    added = _size(rhs, right)
    if not ROUNDS_PRODUCTS or _size(lhs, range(lhs.ndim)) * free < _ROUNDED_FROM:
        return False
    return not has_amx() or added <= _MOST_ADDED or free >= _WIDE * added


def _size(array: Any, dims: Iterable[int]) -> float:
    size = math.prod(array.shape[d] for d in dims)
    return size if isinstance(size, int) else math.inf


def _others(ndim: int, *dims: Sequence[int]) -> list[int]:
    taken = {d for some in dims for d in some}
    return [d for d in range(ndim) if d not in taken]


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
        numbers = (tuple(other_kept), in_cotangent), (tuple(other_batch), batched)
        factors, order = (other, cotangent), other_first
    else:
        numbers = (in_cotangent, tuple(other_kept)), (batched, tuple(other_batch))
        factors, order = (cotangent, other), cotangent_first
    params = {
        **params,
        "dimension_numbers": numbers,
        "preferred_element_type": aval.dtype,
        "out_sharding": _sharding_in(aval, order),
        "transposed": order != sorted(order),
    }
    result = product_p.bind(*factors, **params)
    return lax.transpose(result, np.argsort(order))


def _sharding_in(aval: Any, order: Sequence[int]) -> Any:
    """An array's sharding with its dimensions in another order, if types have one."""
    sharding = aval.sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    spec = sharding.spec
    partitions = [*spec, *(None for _ in range(aval.ndim - len(spec)))]
    return sharding.update(spec=spec.update(tuple(partitions[d] for d in order)))


product_p, product_of_weights_p = define(lax.dot_general_p, _product_on_cpu, _gradient)
