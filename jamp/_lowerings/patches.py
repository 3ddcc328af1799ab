"""Convolutions of 16-bit arrays on CPUs, as matrix products where these are faster.

XLA has no 16-bit convolutions for CPUs, but products: patches of the pictures times the
weights. Writing the patches costs as much as some 200 multiplications with each of
their elements, so that it depends on the shapes what is faster; see
docs/performance.md.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.bilinear import PRECISION
from jamp._lowerings.processor import has_amx, has_fast_products
from jamp._lowerings.product import multiply_on_cpu

_MOST_SLICES = 64
# Beyond, patches leave the cache before they are read: they are made of some pictures
# at a time.
_MOST_BYTES = 16 * 2**20


class Shape(NamedTuple):
    """A convolution without groups and without a dilated left operand."""

    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]  # of the window
    dims: lax.ConvDimensionNumbers


def convolve_on_cpu(
    lhs: Any,
    rhs: Any,
    *,
    wide: Any,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    to: DType,
) -> Any:
    """The convolution of two arrays of one 16-bit dtype, added up in float32.

    Args:
      lhs: the pictures.
      rhs: the weights.
      wide: the pictures as they were before they were cast, if at hand: XLA convolves
        in float32, and need not have them rounded. Weights are: they may be stored so.
      to: the dtype of the result.
      **others: as `jax.lax.conv_general_dilated` has them.
    """
    shape = Shape(window_strides, padding, rhs_dilation, dimension_numbers)
    groups = feature_group_count > 1 or batch_group_count > 1
    sizes = [*lhs.shape, *rhs.shape]
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    fast = lhs.dtype == BFLOAT16 and has_fast_products()
    if fast and known and not groups:
        if all(d == 1 for d in lhs_dilation):
            return _convolved(lhs, rhs, shape, to, wide)
        if all(s == 1 for s in (*window_strides, *rhs_dilation)):
            return _by_phases(lhs, rhs, shape, lhs_dilation, to)
    if fast:
        lhs, rhs = (lax.convert_element_type(a, FLOAT32) for a in (wide, rhs))
    return _by_xla(
        lhs,
        rhs,
        to,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )


def _convolved(lhs: Any, rhs: Any, shape: Shape, to: DType, wide: Any) -> Any:
    windows = [rhs.shape[d] for d in shape.dims.rhs_spec[2:]]
    outs = _out_sizes([lhs.shape[d] for d in shape.dims.lhs_spec[2:]], rhs, shape)
    by_window = math.prod(windows) <= math.prod(outs)
    count = min(math.prod(windows), math.prod(outs))
    strided = not by_window and math.prod(shape.dilation) > 1
    reused = rhs.shape[shape.dims.rhs_spec[0]]
    worth = count == 1 or strided or reused >= (128 if has_amx() else 256)
    if min(outs, default=1) > 0 and count <= _MOST_SLICES and worth:
        return _in_parts(_padded(lhs, shape), rhs, shape, outs, to, by_window=by_window)
    lhs, rhs = (lax.convert_element_type(array, FLOAT32) for array in (wide, rhs))
    return _by_xla(
        lhs,
        rhs,
        to,
        window_strides=shape.strides,
        padding=shape.padding,
        rhs_dilation=shape.dilation,
        dimension_numbers=shape.dims,
    )


def _by_xla(lhs: Any, rhs: Any, to: DType, **params: Any) -> Any:
    result = lax.conv_general_dilated(lhs, rhs, **params, precision=PRECISION)
    return lax.convert_element_type(result, to)


def _out_sizes(sizes: Sequence[int], rhs: Any, shape: Shape) -> list[int]:
    spatial = zip(
        sizes,
        [rhs.shape[d] for d in shape.dims.rhs_spec[2:]],
        shape.strides,
        shape.padding,
        shape.dilation,
        strict=True,
    )
    return [
        (size + low + high - (window - 1) * dilation - 1) // stride + 1
        for size, window, stride, (low, high), dilation in spatial
    ]


def _padded(lhs: Any, shape: Shape) -> Any:
    config = [(0, 0, 0)] * lhs.ndim
    for d, (low, high) in zip(shape.dims.lhs_spec[2:], shape.padding, strict=True):
        config[d] = low, high, 0
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), config)


def _in_parts(
    lhs: Any,
    rhs: Any,
    shape: Shape,
    outs: Sequence[int],
    to: DType,
    *,
    by_window: bool,
) -> Any:
    """The convolution, of so many pictures at a time that their patches stay in cache.

    Pictures are its batch or, in the gradient of weights, what it adds up.
    """
    lhs_spec, rhs_spec, out_spec = shape.dims
    windows = [rhs.shape[d] for d in rhs_spec[2:]]
    axis = lhs_spec[0] if by_window else lhs_spec[1]
    pictures = lhs.shape[axis]
    elements = lhs.shape[lhs_spec[0]] * lhs.shape[lhs_spec[1]] * math.prod(outs)
    each = elements * math.prod(windows) * lhs.dtype.itemsize // pictures
    part = next(
        n
        for n in range(pictures, 0, -1)
        if pictures % n == 0 and (n == 1 or n * each <= _MOST_BYTES)
    )
    multiply = partial(_by_product, shape=shape, outs=outs, by_window=by_window)
    if part == pictures or min(math.prod(windows), math.prod(outs)) == 1:
        return multiply(lhs, rhs, to)
    starts = jnp.arange(0, pictures, part)

    def some(array: Any, start: Any, axis: int) -> Any:
        return lax.dynamic_slice_in_dim(array, start, part, axis)

    if by_window:
        parts = lax.map(lambda n: multiply(some(lhs, n, axis), rhs, to), starts)
        return _merged(jnp.moveaxis(parts, 0, out_spec[0]), out_spec[0])

    def add(total: Any, start: Any) -> tuple[Any, None]:
        factors = some(lhs, start, axis), some(rhs, start, rhs_spec[1])
        return total + multiply(*factors, FLOAT32), None

    first = jax.eval_shape(partial(multiply, to=FLOAT32), lhs, rhs)
    total, _ = lax.scan(add, jnp.zeros(first.shape, FLOAT32), starts)
    return lax.convert_element_type(total, to)


def _merged(array: Any, axis: int) -> Any:
    """An array with a dimension and the next one made one."""
    rest = array.shape[axis + 2 :]
    return array.reshape(*array.shape[:axis], -1, *rest)


def _by_product(
    lhs: Any, rhs: Any, to: DType, *, shape: Shape, outs: Sequence[int], by_window: bool
) -> Any:
    """Patches of padded pictures times the weights.

    A patch is a slice for each place in the window or, if there are fewer, for each
    place in the result; the slices are stacked along a new dimension.
    """
    (batch, feature, *spatial), (out, into, *window), out_spec = shape.dims
    windows = [rhs.shape[d] for d in window]
    counts, steps = (windows, shape.dilation) if by_window else (outs, shape.strides)
    sizes, strides = (outs, shape.strides) if by_window else (windows, shape.dilation)
    taken = [
        _sliced(lhs, spatial, starts, sizes, strides)
        for starts in itertools.product(
            *(range(0, n * step, step) for n, step in zip(counts, steps, strict=True))
        )
    ]
    at = max(batch, feature)
    patches = jnp.stack(taken, at)
    # Where the dimensions of the pictures are now.
    batch, feature, *spatial = (d + (d >= at) for d in (batch, feature, *spatial))
    if by_window:
        # The weights, small, in the order of the patches.
        flat = lax.transpose(rhs, (*window, into, out))
        flat = flat.reshape(len(taken), flat.shape[-2], flat.shape[-1])
        numbers: Any = ((at, feature), (0, 1)), ((), ())
        result = multiply_on_cpu(patches, flat, numbers, to)
        kept = [batch, *spatial]
        where = [sorted(kept).index(d) for d in kept]
        order = [where[0], len(kept), *where[1:]]
    else:
        numbers = ((feature, *spatial), (into, *window)), ((), ())
        result = multiply_on_cpu(patches, rhs, numbers, to)
        # The stacked dimension stands beside that of the batch.
        stack = 0 if at < batch else 1
        rest = result.shape[stack + 1 :]
        result = result.reshape(*result.shape[:stack], *outs, *rest)
        first = 0 if stack else len(outs)
        order = [first, result.ndim - 1, *range(stack, stack + len(outs))]
    return lax.transpose(result, [order[out_spec.index(d)] for d in range(lhs.ndim)])


def _sliced(
    lhs: Any,
    spatial: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> Any:
    first, last, step = [0] * lhs.ndim, list(lhs.shape), [1] * lhs.ndim
    for d, start, size, stride in zip(spatial, starts, sizes, strides, strict=True):
        first[d], last[d], step[d] = start, start + (size - 1) * stride + 1, stride
    return lax.slice(lhs, first, last, step)


def _by_phases(
    lhs: Any, rhs: Any, shape: Shape, dilations: Sequence[int], to: DType
) -> Any:
    """A convolution whose left operand is dilated, as the gradients of strided ones.

    Places of the result that are equal modulo the dilation meet the same places of the
    window, and no zeros: each such phase is a convolution without dilation.
    """
    spatial = shape.dims.out_spec[2:]
    sizes = [lhs.shape[d] for d in shape.dims.lhs_spec[2:]]
    dilated = [(size - 1) * d + 1 for size, d in zip(sizes, dilations, strict=True)]
    outs = _out_sizes(dilated, rhs, shape)
    rounds = [-(-size // d) for size, d in zip(outs, dilations, strict=True)]
    stacked = jnp.stack(
        [
            _phase(lhs, rhs, shape, to, zip(phase, dilations, rounds, strict=True))
            for phase in itertools.product(*map(range, dilations))
        ]
    )
    stacked = stacked.reshape(*dilations, *stacked.shape[1:])
    order: list[int] = []
    for d in range(lhs.ndim):
        order += [len(spatial) + d, *([spatial.index(d)] if d in spatial else [])]
    merged = list(stacked.shape[len(spatial) :])
    for d, dilation in zip(spatial, dilations, strict=True):
        merged[d] *= dilation
    result = lax.transpose(stacked, order).reshape(merged)
    for d, size in zip(spatial, outs, strict=True):
        result = lax.slice_in_dim(result, 0, size, axis=d)
    return result


def _phase(
    lhs: Any, rhs: Any, shape: Shape, to: DType, phases: Iterable[tuple[int, int, int]]
) -> Any:
    lhs_spec, rhs_spec, out_spec = shape.dims
    padding = []
    sizes = {out_spec[0]: lhs.shape[lhs_spec[0]], out_spec[1]: rhs.shape[rhs_spec[0]]}
    for at, (phase, dilation, size) in enumerate(phases):
        low, _ = shape.padding[at]
        first = min((low - phase) % dilation, rhs.shape[rhs_spec[2 + at]])
        rhs = lax.slice_in_dim(rhs, first, None, dilation, axis=rhs_spec[2 + at])
        low = (low - phase - first) // dilation
        taps = rhs.shape[rhs_spec[2 + at]]
        padding.append((low, size + taps - 1 - lhs.shape[lhs_spec[2 + at]] - low))
        sizes[out_spec[2 + at]] = size
    if rhs.size == 0:
        return jnp.zeros([sizes[d] for d in range(lhs.ndim)], to)
    return _convolved(lhs, rhs, shape._replace(padding=padding), to, lhs)
