"""Convolutions as products of patches with the weights.

A patch is what meets the window at one place of the result. Patches are made of slices,
one for each place in the window, or in the result if there are fewer of these, and of
some pictures at a time, so that they stay in the cache.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.pictures import (
    Shape,
    arranged,
    as_bits,
    from_bits,
    merged,
    padded,
    rounded,
    zeros_after,
)
from jamp._lowerings.product import multiply_on_cpu
from jamp._lowerings.releases import KEEPS_BARRIERS, MOVES_BFLOAT16_AS_FLOAT32

# Of more, patches leave the cache before they are read; of fewer, a loop takes longer.
_MOST_BYTES = 4 * 2**20
_LEAST_BYTES = 2**20
# Rows of the result for each row that is met beyond these.
_LEAST_ROWS = 8


class Steps(NamedTuple):
    """What a spatial dimension is sliced into, one slice for each place in the window.

    Attributes:
      dim: the dimension of the pictures.
      size: of a slice, and of the result.
      stride: from one element of a slice to the next.
      dilation: from one slice to the next.
      features: how many each slice has.
    """

    dim: int
    size: int
    stride: int
    dilation: int
    features: Sequence[int]


def _steps(
    lhs: Any,
    shape: Shape,
    sizes: Sequence[int],
    strides: Sequence[int],
    counts: Sequence[int],
    dilations: Sequence[int],
) -> list[Steps]:
    """Those of each spatial dimension, for so many slices."""
    _, feature, *spatial = shape.dimension_numbers.lhs_spec
    features = [[lhs.shape[feature]] * count for count in counts]
    described = zip(spatial, sizes, strides, dilations, features, strict=True)
    return [Steps(*of) for of in described]


def _folded(lhs: Any, shape: Shape, steps: list[Steps]) -> tuple[Any, list[Steps]]:
    """Padded pictures, with what lies within one stride as features of one element.

    Several places of the window then are one slice, of elements that are neighbours.
    """
    *others, last = steps
    stride, taps, each = last.stride, len(last.features), last.features[0]
    beside = shape.dimension_numbers.lhs_spec[1] == last.dim + 1 == lhs.ndim - 1
    neighbours = beside and stride > 1 and taps > 1 and last.dilation == 1
    # Where XLA moves each element by itself, nothing is gained.
    if MOVES_BFLOAT16_AS_FLOAT32 or not neighbours:
        return padded(lhs, shape), steps
    features = [min(stride, taps - at) * each for at in range(0, taps, stride)]
    blocks = last.size + len(features) - 1
    low, _ = shape.padding[-1]
    padding = *shape.padding[:-1], (low, blocks * stride - low - lhs.shape[last.dim])
    # XLA would compute the new shape's indices for each element that it pads.
    wider = lax.optimization_barrier(padded(lhs, shape._replace(padding=padding)))
    folded = wider.reshape(*wider.shape[: last.dim], blocks, stride * each)
    return folded, [*others, last._replace(stride=1, features=features)]


def by_windows(lhs: Any, rhs: Any, shape: Shape, outs: Sequence[int], to: DType) -> Any:
    """Patches of pictures times the weights, so many that they stay in the cache.

    A patch is all that a window meets, or what one of its rows does: then each row of
    the pictures is multiplied with all rows of the window, and what belongs together is
    added up. At a time it is those of some pictures, or of some rows of one.
    """
    (batch, _, *spatial), (out, into, *window), out_spec = shape.dimension_numbers
    windows = [rhs.shape[d] for d in window]
    steps = _steps(lhs, shape, outs, shape.window_strides, windows, shape.rhs_dilation)
    if math.prod(windows) == 1:
        weights = lax.transpose(rhs, (*window, into, out)).reshape(rhs.shape[into], -1)
        return _of_windows(padded(lhs, shape), weights, shape, steps, to)
    by_rows = _are_by_rows(rhs, shape, steps[0])
    first, *rest = window
    order = (*rest, into, first, out) if by_rows else (*window, into, out)
    wide = rhs.shape[out] * (windows[0] if by_rows else 1)
    weights = lax.transpose(rhs, order).reshape(-1, wide)
    each = _bytes_of_row(weights, outs, by_rows)
    reach = _extra_rows(steps[0]) if by_rows else 0
    pictures = _part(lhs.shape[batch], (outs[0] + reach) * each)
    size = outs[0] if pictures > 1 else _rows_at_once(outs[0], each, reach)

    def convolve(some: Any) -> Any:
        low, (first, *others) = _folded(rounded(some), shape, steps)
        reach = low.shape[spatial[0]] - (outs[0] - size) * first.stride
        multiply = partial(
            _of_rows if by_rows else _of_windows,
            weights=weights,
            shape=shape,
            steps=[first._replace(size=size), *others],
            to=to,
        )
        some_rows = outs[0] // size, size * first.stride, reach
        return _in_parts(multiply, low, some_rows, spatial[0], out_spec[2])

    some_pictures = lhs.shape[batch] // pictures, pictures, pictures
    return _in_parts(convolve, lhs, some_pictures, batch, out_spec[0])


def _are_by_rows(rhs: Any, shape: Shape, rows: Steps) -> bool:
    """Whether patches are of a row of the window."""
    many = _LEAST_ROWS * _extra_rows(rows) <= rows.size
    plain = rows.stride == 1 and len(rows.features) > 1
    return plain and many and _writes_less_by_rows(rhs, shape)


def _writes_less_by_rows(rhs: Any, shape: Shape) -> bool:
    """Whether smaller patches spare more than products in float32 add."""
    out, into, first, *others = shape.dimension_numbers.rhs_spec
    count, patch = rhs.shape[first], math.prod(rhs.shape[d] for d in (into, *others))
    # Slices are written, read and written as patches; products are written and read.
    spared = (count - 1) * patch * 3 * BFLOAT16.itemsize
    added = count * rhs.shape[out] * 2 * FLOAT32.itemsize
    return bool(added <= spared)


def _extra_rows(rows: Steps) -> int:
    """How many rows of the pictures are met beyond one for each of the result."""
    return (len(rows.features) - 1) * rows.dilation


def _bytes_of_row(weights: Any, outs: Sequence[int], by_rows: bool) -> int:
    """What is written for a row of the result: patches, and products to add up."""
    patch, features = weights.shape
    each: int = patch * BFLOAT16.itemsize + features * FLOAT32.itemsize * by_rows
    return math.prod(outs[1:]) * each


def _rows_at_once(rows: int, each: int, reach: int) -> int:
    """How many rows of so many bytes to take at a time, which meet some more."""
    size = _part(rows, each)
    if size * each < _LEAST_BYTES:
        return rows
    return next(
        n for n in range(max(size, _LEAST_ROWS * reach), rows + 1) if rows % n == 0
    )


def _part(count: int, each: int) -> int:
    """How many of some things of so many bytes to take at a time."""
    parts = (n for n in range(count, 0, -1) if count % n == 0)
    return next(n for n in parts if n == 1 or n * each <= _MOST_BYTES)


def _in_parts(
    fn: Callable[[Any], Any],
    array: Any,
    parts: tuple[int, int, int],
    axis: int,
    out_axis: int,
) -> Any:
    """A function of an array in parts: so many, from one to the next, of a size."""
    count, step, size = parts
    if count == 1:
        return fn(array)

    def of_part(array: Any, part: Any) -> Any:
        some = lax.dynamic_slice_in_dim(array, part * step, size, axis)
        return as_bits(fn(some))

    one = jax.eval_shape(of_part, array, 0)
    array, zeros = zeros_after(array, (count, *one.shape), one.dtype)

    def write(part: Any, results: Any) -> Any:
        result = of_part(array, part)
        return lax.dynamic_update_index_in_dim(results, result, part, 0)

    results = lax.fori_loop(0, count, write, zeros)
    return from_bits(merged(results, (out_axis,)))


def _of_windows(
    lhs: Any, weights: Any, shape: Shape, steps: Sequence[Steps], to: DType
) -> Any:
    """The result for padded pictures, of their patches at once.

    Patches are stacked slices, one for each place in the window.
    """
    (batch, feature, *_), _, out_spec = shape.dimension_numbers
    patches = from_bits(lax.concatenate(_slices(lhs, feature, steps), feature))
    numbers: Any = ((feature,), (0,)), ((), ())
    result = multiply_on_cpu(patches, weights, numbers, to)
    kept = [batch, *(of.dim for of in steps)]
    where = [sorted(kept).index(d) for d in kept]
    order = [where[0], len(kept), *where[1:]]
    return arranged(result, order, out_spec)


def _of_rows(
    lhs: Any, weights: Any, shape: Shape, steps: Sequence[Steps], to: DType
) -> Any:
    """The same of patches of a row of the window, times the weights of all its rows."""
    rows, *others = steps
    count = len(rows.features)
    met = rows._replace(size=lhs.shape[rows.dim], features=rows.features[:1])
    result = _of_windows(lhs, weights, shape, [met, *others], FLOAT32)
    _, feature, along, *_ = shape.dimension_numbers.out_spec
    each = result.shape[feature] // count

    def of_row(at: int) -> Any:
        some = lax.slice_in_dim(result, at * each, (at + 1) * each, axis=feature)
        start = at * rows.dilation
        return lax.slice_in_dim(some, start, start + rows.size, axis=along)

    return lax.convert_element_type(sum(map(of_row, range(1, count)), of_row(0)), to)


def by_places(lhs: Any, rhs: Any, shape: Shape, outs: Sequence[int], to: DType) -> Any:
    """What meets the window at each place of the result, times the weights.

    So are gradients of weights, which have few places. Of so many pictures at a time
    that these slices stay in the cache; the products are added up.
    """
    (batch, axis, *_), (_, into, *window), _ = shape.dimension_numbers
    pictures, places = lhs.shape[axis], math.prod(outs)
    elements = lhs.shape[batch] * math.prod(rhs.shape[d] for d in window)
    each = places * elements * BFLOAT16.itemsize
    part = _part(pictures, each)
    multiply = partial(_of_places, shape=shape, outs=outs)
    if places == 1:
        return multiply(lhs, rhs, to)
    if part == pictures:
        return multiply(rounded(lhs), rhs, to)
    first = jax.eval_shape(partial(multiply, to=FLOAT32), lhs, rhs)
    rhs = as_bits(rhs)
    rhs, zeros = zeros_after(rhs, first.shape, FLOAT32)

    def add(total: Any, start: Any) -> tuple[Any, None]:
        some, weights = (
            lax.dynamic_slice_in_dim(array, start, part, along)
            for array, along in ((lhs, axis), (rhs, into))
        )
        return total + multiply(rounded(some), from_bits(weights), FLOAT32), None

    starts = jnp.arange(0, pictures, part)
    total, _ = lax.scan(add, zeros, starts)
    return lax.convert_element_type(total, to)


def _of_places(
    lhs: Any, rhs: Any, to: DType, *, shape: Shape, outs: Sequence[int]
) -> Any:
    """The same of some pictures, at once."""
    lhs_spec, (out, into, *window), out_spec = shape.dimension_numbers
    batch, feature, *spatial = lhs_spec
    lhs = padded(lhs, shape)
    windows = [rhs.shape[d] for d in window]
    steps = _steps(lhs, shape, windows, shape.rhs_dilation, outs, shape.window_strides)
    at = max(batch, feature)
    patches = from_bits(jnp.stack(_slices(lhs, feature, steps), at))
    # Where the dimensions of the pictures are now.
    batch, feature, *spatial = (d + (d >= at) for d in lhs_spec)
    added: Any = (feature, *spatial), (into, *window)
    if shape.batch_group_count == 1:
        result = multiply_on_cpu(patches, rhs, (added, ((), ())), to)
    else:
        groups = shape.batch_group_count
        left, left_added = _split(patches, batch, groups, added[0])
        right, right_added = _split(rhs, out, groups, added[1])
        numbers: Any = (left_added, right_added), ((batch,), (out,))
        result = multiply_on_cpu(left, right, numbers, to)
        # The groups stand beside the features of each.
        result = lax.collapse(jnp.moveaxis(result, 0, -2), result.ndim - 2)
    # The stacked dimension stands beside that of the batch.
    stack = 0 if at < batch else 1
    rest = result.shape[stack + 1 :]
    result = result.reshape(*result.shape[:stack], *outs, *rest)
    first = 0 if stack else len(outs)
    order = [first, result.ndim - 1, *range(stack, stack + len(outs))]
    return arranged(result, order, out_spec)


def _split(
    array: Any, dim: int, groups: int, others: Sequence[int]
) -> tuple[Any, Sequence[int]]:
    """An array with a dimension in groups, and where some others are then."""
    sizes = [*array.shape]
    sizes[dim : dim + 1] = groups, sizes[dim] // groups
    return array.reshape(sizes), [d + (d > dim) for d in others]


def _slices(lhs: Any, feature: int, steps: Sequence[Steps]) -> list[Any]:
    """One slice for each combination of places in some dimensions."""
    starts = [[at * of.dilation for at in range(len(of.features))] for of in steps]
    lhs, starts = _hidden(lhs, starts)
    slices = []
    for place in itertools.product(*map(enumerate, starts)):
        sizes, strides = [*lhs.shape], [1] * lhs.ndim
        first: list[Any] = [np.uint32(0)] * lhs.ndim
        for of, (at, start) in zip(steps, place, strict=True):
            first[of.dim], strides[of.dim] = start, of.stride
            sizes[of.dim] = (of.size - 1) * of.stride + 1
            sizes[feature] = of.features[at]
        taken = lax.dynamic_slice(lhs, first, sizes)
        if max(strides) > 1:
            taken = lax.slice(taken, [0] * lhs.ndim, sizes, strides)
        slices.append(taken)
    return slices


def _hidden(lhs: Any, starts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Pictures and the starts of slices of each dimension, behind a barrier.

    Of slices whose starts it knows, XLA compiles a kernel each. Behind the barrier it
    still sees which are equal: those of different dimensions never are. With the starts
    are the pictures, or they would be padded in each slice.
    """
    count, far = math.prod(map(len, starts)), max(map(max, starts), default=0) >= 2**24
    if count == 1 or far or not KEEPS_BARRIERS:
        return lhs, [[np.uint32(start) for start in of] for of in starts]
    numbers = [[np.uint32(d << 24 | s) for s in of] for d, of in enumerate(starts, 1)]
    lhs, numbers = lax.optimization_barrier((lhs, numbers))
    low = np.uint32(2**24 - 1)
    return lhs, [[lax.bitwise_and(number, low) for number in of] for of in numbers]
