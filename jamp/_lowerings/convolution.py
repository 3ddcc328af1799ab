"""Convolutions of 16-bit arrays; on CPUs as matrix products where these are faster.

XLA has no 16-bit convolutions for CPUs, but products: patches of the pictures times the
weights. Writing the patches costs as much as some 200 multiplications with each of
their elements, so that it depends on the shapes what is faster; see
docs/performance.md.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jamp._dtypes import BFLOAT16, FLOAT32, DType
from jamp._lowerings.bilinear import PRECISION, define, in_float32, run_as
from jamp._lowerings.processor import (
    CONVERTS_STACKS,
    has_amx,
    has_fast_products,
)
from jamp._lowerings.product import multiply_on_cpu

_MOST_SLICES = 64
# Beyond, patches leave the cache before they are read: they are made of some pictures
# at a time.
_MOST_BYTES = 16 * 2**20


class Shape(NamedTuple):
    """The parameters of a convolution that say what meets what."""

    window_strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    lhs_dilation: Sequence[int]
    rhs_dilation: Sequence[int]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        return cls(*(params[name] for name in cls._fields))


def _convolve_on_cpu(lhs: Any, rhs: Any, wide: Any, params: Mapping[str, Any]) -> Any:
    """The convolution of two arrays of one 16-bit dtype, added up in float32.

    XLA convolves in float32, and need not have the pictures rounded that are at hand as
    they were, `wide`. Weights are: they may be stored so.
    """
    shape, to = Shape.of(params), params["preferred_element_type"]
    groups = shape.feature_group_count > 1 or shape.batch_group_count > 1
    sizes = [*lhs.shape, *rhs.shape]
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    if lhs.dtype == BFLOAT16 and has_fast_products() and known and not groups:
        if all(d == 1 for d in shape.lhs_dilation):
            return _convolved(lhs, rhs, shape, to, wide)
        if all(s == 1 for s in (*shape.window_strides, *shape.rhs_dilation)):
            return _by_phases(lhs, rhs, shape, to)
    return _by_xla(wide, rhs, shape, to)


def _convolved(lhs: Any, rhs: Any, shape: Shape, to: DType, wide: Any) -> Any:
    """A convolution without groups and without a dilated left operand."""
    dims = shape.dimension_numbers
    outs = _out_sizes(lhs, rhs, shape)
    window, places = math.prod(rhs.shape[d] for d in dims.rhs_spec[2:]), math.prod(outs)
    by_window = window <= places
    strided = not by_window and math.prod(shape.rhs_dilation) > 1
    reused = rhs.shape[dims.rhs_spec[0]]
    count = min(window, places)
    worth = count == 1 or strided or reused >= (128 if has_amx() else 256)
    if min(outs, default=1) > 0 and count <= _MOST_SLICES and worth:
        pictures = _padded(lhs if count == 1 else _as_bits(lhs), shape)
        return _in_parts(pictures, rhs, shape, outs, to, by_window=by_window)
    return _by_xla(wide, rhs, shape, to)


def _by_xla(lhs: Any, rhs: Any, shape: Shape, to: DType) -> Any:
    lhs, rhs = (lax.convert_element_type(array, FLOAT32) for array in (lhs, rhs))
    params = shape._asdict()
    result = lax.conv_general_dilated(lhs, rhs, **params, precision=PRECISION)
    return lax.convert_element_type(result, to)


def _out_sizes(lhs: Any, rhs: Any, shape: Shape) -> list[int]:
    convolve = partial(lax.conv_general_dilated, **shape._asdict())
    result = jax.eval_shape(convolve, lhs, rhs)
    return [result.shape[d] for d in shape.dimension_numbers.out_spec[2:]]


def _as_bits(array: Any) -> Any:
    """Numbers of bfloat16 as their bits, where XLA would move them as float32.

    Arrays of other dtypes are left as they are.
    """
    if array.dtype != BFLOAT16 or not CONVERTS_STACKS:
        return array
    return lax.bitcast_convert_type(array, jnp.uint16)


def _from_bits(array: Any) -> Any:
    if array.dtype != jnp.uint16:
        return array
    return lax.bitcast_convert_type(array, BFLOAT16)


def _padded(lhs: Any, shape: Shape) -> Any:
    config = [(0, 0, 0)] * lhs.ndim
    spatial = shape.dimension_numbers.lhs_spec[2:]
    for d, (low, high) in zip(spatial, shape.padding, strict=True):
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
    lhs_spec, rhs_spec, out_spec = shape.dimension_numbers
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
        parts = lax.map(
            lambda n: _as_bits(multiply(some(lhs, n, axis), rhs, to)), starts
        )
        sizes = list(parts.shape[1:])
        sizes[out_spec[0]] = pictures
        return _from_bits(jnp.moveaxis(parts, 0, out_spec[0]).reshape(sizes))

    first = jax.eval_shape(partial(multiply, to=FLOAT32), lhs, rhs)
    rhs = _as_bits(rhs)

    def add(total: Any, start: Any) -> tuple[Any, None]:
        factors = some(lhs, start, axis), _from_bits(some(rhs, start, rhs_spec[1]))
        return total + multiply(*factors, FLOAT32), None

    total, _ = lax.scan(add, jnp.zeros(first.shape, FLOAT32), starts)
    return lax.convert_element_type(total, to)


def _by_product(
    lhs: Any, rhs: Any, to: DType, *, shape: Shape, outs: Sequence[int], by_window: bool
) -> Any:
    """Patches of padded pictures times the weights.

    A patch is a slice for each place in the window or, if there are fewer, for each
    place in the result; the slices are stacked along a new dimension.
    """
    lhs_spec, (out, into, *window), out_spec = shape.dimension_numbers
    batch, feature, *spatial = lhs_spec
    windows = [rhs.shape[d] for d in window]
    many, few = (outs, shape.window_strides), (windows, shape.rhs_dilation)
    (counts, steps), (sizes, strides) = (few, many) if by_window else (many, few)
    taken = [
        _sliced(lhs, zip(spatial, starts, sizes, strides, strict=True))
        for starts in itertools.product(
            *(range(0, n * step, step) for n, step in zip(counts, steps, strict=True))
        )
    ]
    at = max(batch, feature)
    patches = _from_bits(jnp.stack(taken, at))
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


def _sliced(lhs: Any, spans: Iterable[tuple[int, int, int, int]]) -> Any:
    """So many elements of some dimensions, from a first one on, in steps."""
    first, last, step = [0] * lhs.ndim, list(lhs.shape), [1] * lhs.ndim
    for d, start, size, stride in spans:
        first[d], last[d], step[d] = start, start + (size - 1) * stride + 1, stride
    return lax.slice(lhs, first, last, step)


def _by_phases(lhs: Any, rhs: Any, shape: Shape, to: DType) -> Any:
    """A convolution whose left operand is dilated, as the gradients of strided ones.

    Places of the result that are equal modulo the dilation meet the same places of the
    window, and no zeros: each such phase is a convolution without dilation.
    """
    dilations = shape.lhs_dilation
    spatial = shape.dimension_numbers.out_spec[2:]
    outs = _out_sizes(lhs, rhs, shape)
    rounds = [-(-size // d) for size, d in zip(outs, dilations, strict=True)]
    stacked = jnp.stack(
        [
            _as_bits(
                _phase(lhs, rhs, shape, to, zip(phase, dilations, rounds, strict=True))
            )
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
    return _from_bits(result)


def _phase(
    lhs: Any, rhs: Any, shape: Shape, to: DType, phases: Iterable[tuple[int, int, int]]
) -> Any:
    lhs_spec, rhs_spec, out_spec = shape.dimension_numbers
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
    dense = shape._replace(padding=padding, lhs_dilation=(1,) * len(padding))
    return _convolved(lhs, rhs, dense, to, lhs)


@cache
def _gradient_program(place: int, avals: Sequence[Any], shape: Shape) -> Any:
    """JAX's program for the gradient of one operand: of the cotangent and the other."""
    cotangent, other, wanted = avals

    def gradient(cotangent: Any, other: Any) -> Any:
        def convolve(wanted: Any) -> Any:
            pair = (other, wanted) if place else (wanted, other)
            return lax.conv_general_dilated(*pair, **shape._asdict())

        return jax.linear_transpose(convolve, wanted)(cotangent)[0]

    return jax.make_jaxpr(gradient)(cotangent, other)


def _gradient(place: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    wanted, other = (rhs.aval, lhs) if place else (lhs.aval, rhs)
    avals = in_float32([jax.typeof(cotangent), jax.typeof(other), wanted])
    program = _gradient_program(place, avals, Shape.of(params))
    params = {**params, "preferred_element_type": wanted.dtype}
    known = lax.conv_general_dilated_p
    return run_as(convolution_p, known, program, [cotangent, other], params)


convolution_p, convolution_of_weights_p = define(
    lax.conv_general_dilated_p, _convolve_on_cpu, _gradient
)
