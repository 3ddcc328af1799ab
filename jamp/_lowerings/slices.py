"""Slices of pictures, one for each place in some dimensions, that patches are made of.

Patches are made of some pictures at a time, so that they stay in the cache.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jamp._lowerings.pictures import ConvParams, padded
from jamp._lowerings.processor import this_processor
from jamp._lowerings.releases import KEEPS_BARRIERS, MOVES_BFLOAT16_AS_FLOAT32

# Of more, patches leave the cache before they are read. With AMX, which takes less time
# for a part, fewer and larger parts take less.
_MOST_BYTES, _MOST_BYTES_WITH_AMX = 4 * 2**20, 6 * 2**20


class Steps(NamedTuple):
    """What a spatial dimension is sliced into.

    One slice for each place in the window, of the size of the result; or, in a gradient
    of weights, whose window is the cotangent, one for each place of the result, of the
    size of the window. There JAX has the stride of the convolution for a dilation, and
    its dilation for a stride.

    Attributes:
      dim: the dimension of the pictures.
      size: of a slice.
      stride: from one element of a slice to the next.
      dilation: from one slice to the next.
      features: how many each slice has, where they are the last dimension's.
    """

    dim: int
    size: int
    stride: int
    dilation: int
    features: Sequence[int]


def steps_of(
    lhs: Any,
    conv: ConvParams,
    sizes: Sequence[int],
    strides: Sequence[int],
    counts: Sequence[int],
    dilations: Sequence[int],
) -> list[Steps]:
    """Those of each spatial dimension, for so many slices of these sizes."""
    _, feature, *spatial = conv.dimension_numbers.lhs_spec
    features = [[lhs.shape[feature]] * count for count in counts]
    described = zip(spatial, sizes, strides, dilations, features, strict=True)
    return [Steps(*of) for of in described]


def part_of(count: int, each: int) -> int:
    """How many of some things of so many bytes to take at a time."""
    most = _MOST_BYTES_WITH_AMX if this_processor().has_amx else _MOST_BYTES
    parts = (n for n in range(count, 0, -1) if count % n == 0)
    return next(n for n in parts if n == 1 or n * each <= most)


def neighbours_folded(
    lhs: Any, conv: ConvParams, steps: Sequence[Steps], feature: int
) -> tuple[Any, list[Steps]]:
    """Padded pictures, with what lies within one stride as features of one element.

    Several places of the window then are one slice, of elements that are neighbours.
    Features are in the dimension that is told.
    """
    if not steps:
        return lhs, []
    each = lhs.shape[feature]
    *others, last = (of._replace(features=[each] * len(of.features)) for of in steps)
    stride, taps = last.stride, len(last.features)
    beside = feature == last.dim + 1 == lhs.ndim - 1
    neighbours = beside and stride > 1 and taps > 1 and last.dilation == 1
    # Where XLA moves each element by itself, nothing is gained.
    if MOVES_BFLOAT16_AS_FLOAT32 or not neighbours:
        return padded(lhs, conv), [*others, last]
    features = [min(stride, taps - at) * each for at in range(0, taps, stride)]
    blocks = last.size + len(features) - 1
    low, _ = conv.padding[-1]
    padding = *conv.padding[:-1], (low, blocks * stride - low - lhs.shape[last.dim])
    # XLA would compute the new shape's indices for each element that it pads.
    wider = lax.optimization_barrier(padded(lhs, conv._replace(padding=padding)))
    folded = wider.reshape(*wider.shape[: last.dim], blocks, stride * each)
    return folded, [*others, last._replace(stride=1, features=features)]


def slices_of(lhs: Any, feature: int, steps: Sequence[Steps]) -> list[Any]:
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
