"""A U-Net of a diffusion model: GroupNorm, SiLU, attention, skips, resized features."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from subjects._subject import Subject, squared_error


class Size(NamedTuple):
    features: int
    pixels: int
    batch: int


SIZES = {
    "tiny": Size(features=8, pixels=8, batch=2),
    "cpu": Size(features=64, pixels=32, batch=8),
    "gpu": Size(features=128, pixels=64, batch=64),
}
GROUPS, HEADS = 8, 4


def normed(x: jax.Array, dtype: Any) -> jax.Array:
    return nn.silu(nn.GroupNorm(num_groups=GROUPS, dtype=dtype)(x))


class Residual(nn.Module):
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        features, dtype = self.features, self.dtype
        y = nn.Conv(features, (3, 3), dtype=dtype)(normed(x, dtype))
        y = y + nn.Dense(features, dtype=dtype)(nn.silu(time))[:, None, None]
        y = nn.Conv(features, (3, 3), dtype=dtype)(normed(y, dtype))
        if x.shape[-1] != features:
            x = nn.Conv(features, (1, 1), dtype=dtype)(x)
        return x + y


class UNet(nn.Module):
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        features, dtype = self.features, self.dtype
        time = self.embedded(jnp.arange(len(images)))
        x = nn.Conv(features, (3, 3), dtype=dtype)(images)
        skips = []
        for width in (features, 2 * features):
            x = Residual(width, dtype)(x, time)
            skips.append(x)
            x = nn.Conv(width, (3, 3), strides=(2, 2), dtype=dtype)(x)
        x = Residual(2 * features, dtype)(x, time)
        y = nn.GroupNorm(num_groups=GROUPS, dtype=dtype)(x)
        places = y.reshape(len(y), -1, y.shape[-1])
        attended = nn.MultiHeadDotProductAttention(HEADS, dtype=dtype)(places, places)
        x = x + attended.reshape(x.shape)
        for width in (2 * features, features):
            batch, height, breadth, depth = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * breadth, depth), "nearest")
            x = nn.Conv(depth, (3, 3), dtype=dtype)(x)
            x = Residual(width, dtype)(jnp.concatenate([x, skips.pop()], -1), time)
        return nn.Conv(images.shape[-1], (3, 3), dtype=dtype)(normed(x, dtype))

    def embedded(self, steps: jax.Array) -> jax.Array:
        half, width = self.features // 2, 4 * self.features
        frequencies = jnp.exp(-jnp.arange(half) * jnp.log(1e4) / half)
        angles = steps[:, None] * frequencies
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        hidden = nn.silu(nn.Dense(width, dtype=self.dtype)(waves))
        return nn.Dense(width, dtype=self.dtype)(hidden)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    shape = 2, chosen.batch, chosen.pixels, chosen.pixels, 3
    images, noise = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Subject(
        model=lambda dtype, train: UNet(chosen.features, dtype),
        inputs=images,
        targets=noise,
        loss=squared_error,
        optimizer="adamw",
    )
