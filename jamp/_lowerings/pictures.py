"""What convolutions have in common: their parameters, and how pictures are laid out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._dtypes import BFLOAT16
from jamp._lowerings.own_primitives import varying_like
from jamp._lowerings.releases import KEEPS_BARRIERS, MOVES_BFLOAT16_AS_FLOAT32


class ConvParams(NamedTuple):
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


def window_sizes(rhs: Any, conv: ConvParams) -> list[int]:
    """The sizes of the window, which are those of the weights but for features."""
    return [rhs.shape[d] for d in conv.dimension_numbers.rhs_spec[2:]]


def as_bits(array: Any) -> Any:
    """Numbers of bfloat16 as their bits, where XLA would move them as float32.

    Arrays of other dtypes are left as they are.
    """
    if array.dtype != BFLOAT16 or not MOVES_BFLOAT16_AS_FLOAT32:
        return array
    return lax.bitcast_convert_type(array, jnp.uint16)


def from_bits(array: Any) -> Any:
    if array.dtype != jnp.uint16:
        return array
    return lax.bitcast_convert_type(array, BFLOAT16)


def rounded(array: Any) -> Any:
    """Pictures in bfloat16, or its bits, in which they may be already."""
    if array.dtype == jnp.uint16:
        return array
    return as_bits(lax.convert_element_type(array, BFLOAT16))


def zeros_after(array: Any, shape: Sequence[int], some: Any) -> tuple[Any, Any]:
    """An array, and zeros that XLA writes when the array is there.

    Zeros that depend on nothing it would write first of all, and keep until then.

    Args:
      array: the array.
      shape: the shape of the zeros.
      some: an array, or its type, that is like what a loop puts in their place.
    """
    if KEEPS_BARRIERS:
        array, zero = lax.optimization_barrier((array, np.zeros((), some.dtype)))
    else:
        # XLA does not know that nothing is left of these bits.
        first = lax.slice(array, [0] * array.ndim, [1] * array.ndim).reshape(())
        kind = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        bits = lax.bitcast_convert_type(first, kind)
        width = np.asarray(8 * array.dtype.itemsize, kind)
        zero = lax.shift_right_logical(bits, width).astype(some.dtype)
    return array, varying_like(lax.broadcast(zero, shape), some)


def arranged(result: Any, places: Sequence[int], out_spec: Sequence[int]) -> Any:
    """A result in its order, from where its batch, features and others are now."""
    order = [places[out_spec.index(d)] for d in range(result.ndim)]
    return lax.transpose(result, order)


def ordered(
    array: Any, spec: Sequence[int], order: Sequence[int]
) -> tuple[Any, Sequence[int]]:
    """An array with its dimensions in an order, and where those of `spec` are then."""
    if [*order] == sorted(order):
        return array, spec
    moved = lax.transpose(rounded(array), order)
    return moved, [order.index(d) for d in spec]


def padded(lhs: Any, conv: ConvParams) -> Any:
    config = [(0, 0, 0)] * lhs.ndim
    spatial = conv.dimension_numbers.lhs_spec[2:]
    for d, (low, high) in zip(spatial, conv.padding, strict=True):
        config[d] = low, high, 0
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), config)


def merged(stacked: Any, dims: Sequence[int], *, minor: bool = False) -> Any:
    """An array whose leading dimensions are merged into others, one into each."""
    order: list[int] = []
    sizes = []
    for d in range(stacked.ndim - len(dims)):
        together = [len(dims) + d]
        if d in dims:
            together.insert(1 if minor else 0, dims.index(d))
        order += together
        sizes.append(math.prod(stacked.shape[at] for at in together))
    return lax.transpose(stacked, order).reshape(sizes)
