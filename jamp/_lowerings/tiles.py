"""Convolutions in which each element meets one window, as one product without slices.

So do the patches of a vision transformer, and whatever makes pictures smaller or larger
by the size of its window: patches are the pictures in another order.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import jax.numpy as jnp
from jax import lax

from jamp._dtypes import DType
from jamp._lowerings.pictures import (
    ConvParams,
    arranged,
    as_bits,
    from_bits,
    padded,
    rounded,
    window_sizes,
)
from jamp._lowerings.product import multiply_on_cpu
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32


def has_tiles(rhs: Any, conv: ConvParams, outs: Sequence[int]) -> bool:
    """Whether each element of the pictures is in one patch.

    Either the windows lie side by side or, as for the gradient of such weights, their
    places do.
    """
    sizes = window_sizes(rhs, conv)
    steps = zip(conv.window_strides, conv.rhs_dilation, sizes, outs, strict=True)
    return all(
        (stride == taps and (dilation == 1 or taps == 1))
        or (dilation == out and (stride == 1 or out == 1))
        for stride, dilation, taps, out in steps
    )


def makes_tiles(rhs: Any, conv: ConvParams) -> bool:
    """Whether each element of dilated pictures makes a tile of the result by itself.

    The window has neither strides nor a dilation.
    """
    grouped = conv.feature_group_count > 1 or conv.batch_group_count > 1
    return not grouped and [*conv.lhs_dilation] == window_sizes(rhs, conv)


def of_tiles(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """Pictures in tiles, each times the weights."""
    (batch, feature, *spatial), (out, into, *window), out_spec = conv.dimension_numbers
    taps = window_sizes(rhs, conv)
    sizes = [o * t for o, t in zip(outs, taps, strict=True)]
    padding = [
        (low, size - low - lhs.shape[d])
        for d, size, (low, _) in zip(spatial, sizes, conv.padding, strict=True)
    ]
    tiles = padded(lhs, conv._replace(padding=padding))
    # Where the dimensions of the result, and those of the window, are then.
    places, within, pairs = dict[int, int](), dict[int, int](), list[int]()
    for d in range(lhs.ndim):
        if d not in spatial:
            places[d] = len(pairs)
            pairs.append(lhs.shape[d])
            continue
        at = spatial.index(d)
        by_side = conv.window_strides[at] == taps[at]
        first, second = len(pairs), len(pairs) + 1
        places[d], within[window[at]] = (first, second) if by_side else (second, first)
        pairs += (outs[at], taps[at]) if by_side else (taps[at], outs[at])
    within[into] = places.pop(feature)
    # Both in the order in which they are, so that neighbours are read together.
    kept, added = sorted(places, key=places.__getitem__), sorted(within)
    tiles = tiles.reshape(pairs)
    moved = _transposed(
        rounded(tiles) if MOVES_BFLOAT16_AS_FLOAT32 else tiles,
        [*map(places.__getitem__, kept), *map(within.__getitem__, added)],
    )
    moved = moved.reshape(*(pairs[places[d]] for d in kept), -1)
    # Rounded only then, if not as bits: XLA would move 16 bits more slowly.
    patches = from_bits(rounded(lax.optimization_barrier(moved)))
    weights = lax.transpose(rhs, (*added, out)).reshape(-1, rhs.shape[out])
    numbers: Any = ((patches.ndim - 1,), (0,)), ((), ())
    result = multiply_on_cpu(patches, weights, numbers, to)
    where = [kept.index(batch), len(kept), *map(kept.index, spatial)]
    return arranged(result, where, out_spec)


def into_tiles(
    lhs: Any, rhs: Any, conv: ConvParams, outs: Sequence[int], to: DType
) -> Any:
    """A tile of the result from each element of the pictures."""
    (batch, feature, *spatial), (out, into, *window), out_spec = conv.dimension_numbers
    numbers: Any = ((feature,), (into,)), ((), ())
    # The first place that an element meets is the last of its window.
    result = multiply_on_cpu(lhs, lax.rev(rhs, window), numbers, to)
    kept = [d for d in range(lhs.ndim) if d != feature]
    made = [d for d in range(rhs.ndim) if d != into]
    order, sizes = [kept.index(batch)], [lhs.shape[batch]]
    config = [(0, 0, 0)]
    for d, tap, (low, _), size in zip(spatial, window, conv.padding, outs, strict=True):
        order += kept.index(d), len(kept) + made.index(tap)
        sizes.append(lhs.shape[d] * rhs.shape[tap])
        low -= rhs.shape[tap] - 1
        config.append((low, size - sizes[-1] - low, 0))
    order.append(len(kept) + made.index(out))
    tiles = _transposed(as_bits(result), order).reshape(*sizes, rhs.shape[out])
    tiles = lax.pad(tiles, jnp.zeros((), tiles.dtype), [*config, (0, 0, 0)])
    return arranged(
        from_bits(tiles), [0, lhs.ndim - 1, *range(1, lhs.ndim - 1)], out_spec
    )


def _transposed(array: Any, order: Sequence[int]) -> Any:
    """A transpose, with the last dimensions that stay the last as one.

    XLA would move the elements of a short one by one.
    """
    pairs = enumerate(order[::-1], 1)
    same = sum(1 for _ in takewhile(lambda of: of[0] + of[1] == array.ndim, pairs))
    first = array.ndim - max(same, 1)
    merged = lax.collapse(array, first)
    return lax.transpose(merged, order[: first + 1])
