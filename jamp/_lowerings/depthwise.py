"""Convolutions of each feature by itself, added up element by element.

XLA's convolutions for CPUs take one feature at a time, whose elements lie far from each
other. Sums of slices of the pictures, one for each place in the window, take as many
features at a time as the processor's vectors hold.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax

from jamp._dtypes import FLOAT32, DType
from jamp._lowerings.own_primitives import varying_like
from jamp._lowerings.pictures import ConvParams, arranged, padded, window_sizes

# Of so many rows of a picture at a time the products are added up before the sums of
# the rows before are read.
_MOST_ROWS = 16
# So many products are written out, of all places in the other dimensions of the window.
_MOST_TERMS = 128


def is_depthwise(lhs: Any, rhs: Any, conv: ConvParams) -> bool:
    """Whether each feature of the pictures makes one of the result."""
    counts = lhs.shape[conv.dimension_numbers.lhs_spec[1]], _features(rhs, conv)
    return counts == (conv.feature_group_count,) * 2


def is_gradient_of_depthwise(lhs: Any, rhs: Any, conv: ConvParams) -> bool:
    """Whether this makes the gradient of such weights, and pictures have rows."""
    counts = lhs.shape[conv.dimension_numbers.lhs_spec[0]], _features(rhs, conv)
    return lhs.ndim > 2 and counts == (conv.batch_group_count,) * 2


def _features(rhs: Any, conv: ConvParams) -> int:
    features: int = rhs.shape[conv.dimension_numbers.rhs_spec[0]]
    return features


def depthwise(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """A depthwise convolution: slices of the pictures, each times weights."""
    (_, feature, *spatial), (out, into, *window), out_spec = conv.dimension_numbers
    weights = lax.squeeze(lax.transpose(rhs, (*window, out, into)), [rhs.ndim - 1])
    wide = padded(lax.convert_element_type(lhs, FLOAT32), conv)
    # XLA would pad and widen the pictures for each slice of them.
    wide, weights = lax.optimization_barrier(
        (wide, lax.convert_element_type(weights, FLOAT32))
    )
    starts, strides, sizes = [0] * lhs.ndim, [1] * lhs.ndim, [*lhs.shape]
    for d, size, stride in zip(spatial, outs, conv.window_strides, strict=True):
        sizes[d], strides[d] = (size - 1) * stride + 1, stride
    total: Any = None
    for place in itertools.product(*map(range, window_sizes(rhs, conv))):
        for d, at, dilation in zip(spatial, place, conv.rhs_dilation, strict=True):
            starts[d] = at * dilation
        limits = [start + size for start, size in zip(starts, sizes, strict=True)]
        some = lax.slice(wide, starts, limits, strides)
        term = some * lax.broadcast_in_dim(weights[place], some.shape, [feature])
        total = term if total is None else total + term
    # What reads the result would each compute it again.
    result = lax.optimization_barrier(lax.convert_element_type(total, to))
    return arranged(result, conv.dimension_numbers.lhs_spec, out_spec)


class _Rows(NamedTuple):
    """How a gradient takes pictures: some rows of one at a time.

    Attributes:
      parts: how often of each picture.
      size: how many rows of the cotangent.
      stride: from one row of the pictures to the next.
      dilation: from one place in the window to the next.
      reach: how many rows of the pictures the first row of the cotangent meets.
    """

    parts: int
    size: int
    stride: int
    dilation: int
    reach: int

    @classmethod
    def of(cls, rows: int, outs: Sequence[int], conv: ConvParams) -> Self:
        taps, sums = outs[0], math.prod(outs[1:])
        parts = -(-rows // max(1, min(_MOST_ROWS, _MOST_TERMS // sums)))
        stride, dilation = conv.rhs_dilation[0], conv.window_strides[0]
        reach = (taps - 1) * dilation + 1
        return cls(parts, -(-rows // parts), stride, dilation, reach)

    @property
    def met(self) -> int:
        """How many rows of the pictures a part meets."""
        return (self.size - 1) * self.stride + self.reach


def gradient_of_depthwise(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """The gradient of the weights, of pictures and the cotangent of the result.

    In a loop over pictures, and over rows of each, their products are added up element
    by element, for all places in the window; at the end those of each feature are.
    """
    first, *places = window_sizes(rhs, conv)
    rows = _Rows.of(first, outs, conv)
    pictures, cotangents = _in_rows(lhs, rhs, conv, rows)
    others = [*itertools.product(*map(range, outs[1:]))]

    def add(at: Any, totals: list[Any]) -> list[Any]:
        picture, part = at // rows.parts, at % rows.parts
        start = part * rows.size
        some = _taken(pictures, picture, start * rows.stride, rows.met)
        by = _taken(cotangents, picture, start, rows.size)
        return [
            sum(
                (
                    _slice(some, row, place, places, conv, rows)
                    * lax.expand_dims(by[row], (0,))
                    for row in range(rows.size)
                ),
                total,
            )
            for place, total in zip(others, totals, strict=True)
        ]

    zeros = jnp.zeros((outs[0], *places, pictures.shape[-1]), FLOAT32)
    zeros = varying_like(zeros, pictures, cotangents)
    parts = pictures.shape[0] * rows.parts
    totals = lax.fori_loop(0, parts, add, [zeros] * len(others))
    summed = [total.sum(range(1, total.ndim - 1)) for total in totals]
    result = jnp.stack(summed, 1).reshape(*outs, 1, -1)
    order = [len(outs), len(outs) + 1, *range(len(outs))]
    return lax.convert_element_type(
        arranged(result, order, conv.dimension_numbers.out_spec), to
    )


def _in_rows(lhs: Any, rhs: Any, conv: ConvParams, rows: _Rows) -> tuple[Any, Any]:
    """Pictures and cotangents in float32, of whole parts, with their features last."""
    (features, batch, *spatial), (out, into, *window), _ = conv.dimension_numbers
    low, _ = conv.padding[0]
    # The rows that a part has too many are zeros.
    last = (rows.parts - 1) * rows.size
    high = last * rows.stride + rows.met - low - lhs.shape[spatial[0]]
    conv = conv._replace(padding=[(low, high), *conv.padding[1:]])
    pictures = padded(lax.convert_element_type(lhs, FLOAT32), conv)
    pictures = lax.transpose(pictures, (batch, *spatial, features))
    cotangents = lax.transpose(rhs, (into, *window, out)).astype(FLOAT32)
    more = [(0, 0)] * rhs.ndim
    more[1] = 0, last + rows.size - rhs.shape[window[0]]
    # XLA would do this for each slice.
    both: tuple[Any, Any] = lax.optimization_barrier(
        (pictures, jnp.pad(cotangents, more))
    )
    return both


def _taken(arrays: Any, at: Any, start: Any, count: int) -> Any:
    """Some rows of one of a stack of arrays."""
    one = lax.dynamic_index_in_dim(arrays, at, keepdims=False)
    return lax.dynamic_slice_in_dim(one, start, count)


def _slice(
    some: Any,
    row: int,
    place: Sequence[int],
    places: Sequence[int],
    conv: ConvParams,
    rows: _Rows,
) -> Any:
    """What a row of the cotangent meets, for all of the window's first dimension.

    Args:
      some: rows of a picture.
      row: which one of the cotangent's.
      place: in the other dimensions of the window.
      places: the sizes of the cotangent in these.
      conv: of the convolution.
      rows: how the rows are taken.
    """
    starts, strides = [row * rows.stride], [rows.dilation]
    limits = [row * rows.stride + rows.reach]
    steps = zip(conv.window_strides[1:], conv.rhs_dilation[1:], strict=True)
    for at, size, (apart, step) in zip(place, places, steps, strict=True):
        starts.append(at * apart)
        limits.append(at * apart + (size - 1) * step + 1)
        strides.append(step)
    features = some.shape[-1]
    return lax.slice(some, [*starts, 0], [*limits, features], [*strides, 1])
