"""Pooling, resizing and sampling of images and volumes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from ._case import OpCase, Spec, normal, unit

_SIZES = {1: (8,), 2: (8, 6), 3: (8, 6, 4)}


def _channels_last(rank: int) -> tuple[Spec, ...]:
    return (normal(2, *_SIZES[rank], 3),)


def _avg_pool(rank: int):
    return lambda x: nn.avg_pool(x, (2,) * rank, strides=(2,) * rank)


def _max_pool(rank: int):
    return lambda x: nn.max_pool(x, (2,) * rank, strides=(2,) * rank)


def _pool_case(op: str, fn, rank: int) -> OpCase:
    name = op.removesuffix(f"{rank}d")
    window = "(2,)" if rank == 1 else str((2,) * rank)
    text = f"nn.{name}(x, {window}, strides={window})"
    return OpCase(op, fn(rank), _channels_last(rank), text)


def _adaptive(reduce, rank: int):
    """Pools every spatial axis down to 2, as one block each."""

    def fn(x):
        shape = [x.shape[0]]
        for size in x.shape[1 : rank + 1]:
            shape += [2, size // 2]
        blocks = x.reshape(*shape, x.shape[-1])
        return reduce(blocks, axis=tuple(range(2, 2 * rank + 1, 2)))

    return fn


def _adaptive_case(op: str, reduce, rank: int) -> OpCase:
    axes = tuple(range(2, 2 * rank + 1, 2))
    text = f"jnp.{reduce.__name__}(x.reshape(blocks), axis={axes})"
    return OpCase(op, _adaptive(reduce, rank), _channels_last(rank), text)


def _resize_case(op: str, rank: int, method: str, shrink: bool = False) -> OpCase:
    """Doubles every spatial axis, or halves it, which is where antialiasing acts."""
    (spec,) = _channels_last(rank)
    sizes = [size // 2 if shrink else size * 2 for size in _SIZES[rank]]
    shape = (2, *sizes, 3)
    text = f'jax.image.resize(x, shape, "{method}")'
    return OpCase(op, lambda x: jax.image.resize(x, shape, method), (spec,), text)


def _grid_sample(images, grid):
    """Samples (channels, ...) images at coordinates from 0 to 1 in every axis."""
    sizes = images.shape[1:]
    places = [axis * (size - 1) for axis, size in zip(grid, sizes, strict=True)]
    return jax.vmap(lambda image: map_coordinates(image, places, order=1))(images)


def _grid_case(op: str, rank: int) -> OpCase:
    inputs = (normal(3, *_SIZES[rank]), unit(rank, 5, 4))
    text = "jax.scipy.ndimage.map_coordinates(image, coordinates, order=1)"
    return OpCase(op, _grid_sample, inputs, text)


_POOLS = (
    _pool_case("avg_pool1d", _avg_pool, 1),
    _pool_case("avg_pool2d", _avg_pool, 2),
    _pool_case("avg_pool3d", _avg_pool, 3),
    _pool_case("max_pool1d", _max_pool, 1),
    _pool_case("max_pool2d", _max_pool, 2),
    _pool_case("max_pool3d", _max_pool, 3),
    _adaptive_case("adaptive_avg_pool2d", jnp.mean, 2),
    _adaptive_case("adaptive_avg_pool3d", jnp.mean, 3),
    _adaptive_case("adaptive_max_pool1d", jnp.max, 1),
    _adaptive_case("adaptive_max_pool2d", jnp.max, 2),
    _adaptive_case("adaptive_max_pool3d", jnp.max, 3),
)

_RESIZES = (
    _resize_case("upsample_nearest1d", 1, "nearest"),
    _resize_case("upsample_nearest2d", 2, "nearest"),
    _resize_case("upsample_nearest3d", 3, "nearest"),
    _resize_case("_upsample_nearest_exact1d", 1, "nearest"),
    _resize_case("_upsample_nearest_exact2d", 2, "nearest"),
    _resize_case("_upsample_nearest_exact3d", 3, "nearest"),
    _resize_case("upsample_linear1d", 1, "linear"),
    _resize_case("upsample_bilinear2d", 2, "linear"),
    _resize_case("upsample_trilinear3d", 3, "linear"),
    _resize_case("upsample_bicubic2d", 2, "cubic"),
    _resize_case("_upsample_bilinear2d_aa", 2, "linear", shrink=True),
    _resize_case("_upsample_bicubic2d_aa", 2, "cubic", shrink=True),
)

_SAMPLERS = (
    _grid_case("grid_sample", 2),
    _grid_case("grid_sampler", 2),
    _grid_case("grid_sampler_2d", 2),
    _grid_case("grid_sampler_3d", 3),
)

_SHUFFLES = (
    OpCase(
        "pixel_shuffle",
        lambda x: x.reshape(2, 4, 3, 2, 2, 3).swapaxes(2, 3).reshape(2, 8, 6, 3),
        (normal(2, 4, 3, 12),),
        "x.reshape(n, h, w, 2, 2, c).swapaxes(2, 3).reshape(n, 2 * h, 2 * w, c)",
    ),
)

CASES = (*_POOLS, *_RESIZES, *_SAMPLERS, *_SHUFFLES)
