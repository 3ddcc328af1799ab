"""Gradients of weights as products, of what meets the window at each of its places.

The window is large here, as large as pictures are, and has few places: of the gradient
of weights of 3x3 elements it has nine.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.pictures import (
    ConvParams,
    arranged,
    as_bits,
    from_bits,
    merged,
    padded,
    rounded,
    zeros_after,
)
from jamp._lowerings.product import multiply_on_cpu
from jamp._lowerings.slices import (
    neighbours_folded,
    part_of,
    slices_of,
    steps_of,
)


def by_places(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """What meets the window at each place of the result, times the weights.

    Here are pictures, whose features are a batch, and which add up as features do; the
    cotangent of the convolution has the part of weights. Both begin with what adds up,
    and end with what does not. Of so many pictures at a time that their slices stay in
    the cache; the products are added up.
    """
    if math.prod(outs) == 1:
        return _multiply_places(lhs, rhs, to, conv=conv, outs=outs)
    pictures, by_rows = lhs.shape[0], are_by_rows(lhs, rhs, conv, outs)
    size = (_size_by_rows if by_rows else _size_by_places)(lhs, rhs, conv, outs)
    each, groups = size // pictures * BFLOAT16.itemsize, conv.batch_group_count
    if (some := part_of(groups, each // groups)) < groups:
        return _by_groups(lhs, rhs, conv, outs, to, some)
    part = part_of(pictures, each)
    multiply = partial(
        _multiply_rows if by_rows else _multiply_places, conv=conv, outs=outs
    )
    if part == pictures:
        return multiply(rounded(lhs), rhs, to)
    first = jax.eval_shape(partial(multiply, to=FLOAT32), lhs, rhs)
    rhs = as_bits(rhs)
    rhs, zeros = zeros_after(rhs, first.shape, first)

    def add(total: Any, start: Any) -> tuple[Any, None]:
        some, weights = (
            lax.dynamic_slice_in_dim(array, start, part, 0) for array in (lhs, rhs)
        )
        return total + multiply(rounded(some), from_bits(weights), FLOAT32), None

    starts = jnp.arange(0, pictures, part)
    total, _ = lax.scan(add, zeros, starts)
    return lax.convert_element_type(total, to)


def _by_groups(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType, part: int
) -> Any:
    """The same of some groups at a time, where one picture's are too many.

    As where each example has weights of its own.
    """
    count = conv.batch_group_count // part
    groups = conv._replace(batch_group_count=part)
    arrays = [_in_groups(array, count) for array in (lhs, as_bits(rhs))]

    def of_part(at: Any) -> Any:
        some, weights = (
            lax.dynamic_index_in_dim(array, at, array.ndim - 2, keepdims=False)
            for array in arrays
        )
        return as_bits(by_places(some, from_bits(weights), groups, outs, to))

    results = lax.map(of_part, jnp.arange(count))
    return from_bits(merged(results, conv.dimension_numbers.out_spec[1:2]))


def are_by_rows(lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int]) -> bool:
    """Whether slices are of rows of both operands, which are fewer."""
    plain = conv.rhs_dilation[0] == conv.batch_group_count == 1 < outs[0]
    return plain and _size_by_rows(lhs, rhs, conv, outs) < _size_by_places(
        lhs, rhs, conv, outs
    )


def _size_by_places(lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int]) -> int:
    """How many numbers the slices for all places have."""
    (batch, *_), (out, *_), _ = conv.dimension_numbers
    return int(math.prod(outs) * lhs.shape[batch] * rhs.size // rhs.shape[out])


def _size_by_rows(lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int]) -> int:
    """How many those for the rows of the result have, and for the places of one row."""
    (batch, _, row, *_), (out, into, _, *beside), _ = conv.dimension_numbers
    features = math.prod(outs[1:]) * lhs.shape[batch] + outs[0] * rhs.shape[out]
    width = math.prod(rhs.shape[d] for d in (into, *beside))
    return int(features * lhs.shape[row] * width)


def _multiply_rows(
    lhs: Any, rhs: Any, to: DType, *, conv: ConvParams, outs: Sequence[int]
) -> Any:
    """The gradient of weights from pictures in slices for the places of a row.

    A row of them meets each row of the cotangent, which is sliced for the rows of the
    result. Rows that meet nothing are padded with zeros there.
    """
    first, *others = conv.padding
    beside = conv._replace(padding=[(0, 0), *others])
    sizes = [lhs.shape[1], *rhs.shape[2:-1]]
    strides, dilations = conv.rhs_dilation, conv.window_strides
    rows, *rest = steps_of(lhs, conv, sizes, strides, outs, dilations)
    reach = (outs[0] - 1) * rows.dilation
    low = reach - first[0]
    high = reach + lhs.shape[1] - low - rhs.shape[1]
    left = from_bits(jnp.stack(slices_of(padded(lhs, beside), 0, rest), lhs.ndim - 1))
    config = [(0, 0, 0), (low, high, 0), *[(0, 0, 0)] * (rhs.ndim - 2)]
    wider = lax.pad(rhs, jnp.zeros((), rhs.dtype), config)
    right = jnp.stack(slices_of(wider, 0, [rows])[::-1], rhs.ndim - 1)
    added = tuple(range(lhs.ndim - 1))
    result = multiply_on_cpu(left, right, ((added, added), ((), ())), to)
    _, *features = result.shape
    result = result.reshape(*outs[1:], *features)
    at = len(outs) - 1
    order = [at, at + 2, at + 1, *range(at)]
    return arranged(result, order, conv.dimension_numbers.out_spec)


def _multiply_places(
    lhs: Any, rhs: Any, to: DType, *, conv: ConvParams, outs: Sequence[int]
) -> Any:
    """The same from slices for each place of the result."""
    numbers, sizes = conv.dimension_numbers, rhs.shape[1:-1]
    strides, dilations = conv.rhs_dilation, conv.window_strides
    steps = steps_of(lhs, conv, sizes, strides, outs, dilations)
    last = lhs.ndim - 1
    folded, steps = neighbours_folded(lhs, conv, steps, last)
    left = from_bits(lax.concatenate(slices_of(folded, last, steps), last))
    left = left.reshape(*left.shape[:-1], math.prod(outs), lhs.shape[last])
    added = tuple(range(last))
    groups = conv.batch_group_count
    if groups == 1:
        result = multiply_on_cpu(left, rhs, ((added, added), ((), ())), to)
    else:
        left, rhs = _in_groups(left, groups), _in_groups(rhs, groups)
        batch = (left.ndim - 2,), (rhs.ndim - 2,)
        result = multiply_on_cpu(left, rhs, ((added, added), batch), to)
        # The groups stand beside the features of each.
        result = lax.collapse(jnp.moveaxis(result, 0, -2), result.ndim - 2)
    result = result.reshape(*outs, *result.shape[1:])
    at = len(outs)
    return arranged(result, [at, at + 1, *range(at)], numbers.out_spec)


def _in_groups(array: Any, groups: int) -> Any:
    """An array whose last dimension is in groups."""
    *others, last = array.shape
    return array.reshape(*others, groups, last // groups)
