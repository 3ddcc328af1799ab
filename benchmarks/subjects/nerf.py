"""A radiance field: waves of places, a deep narrow network, light added up on rays."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from subjects._subject import Subject, squared_error

WAVES, DEPTH, SKIP = 10, 8, 5
STEP = 0.05  # between two places of a ray


class Size(NamedTuple):
    width: int
    rays: int
    places: int


SIZES = {
    "tiny": Size(width=16, rays=4, places=4),
    "cpu": Size(width=128, rays=128, places=32),
    "gpu": Size(width=256, rays=4096, places=128),
}


class Nerf(nn.Module):
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, places: jax.Array) -> jax.Array:
        angles = places[..., None] * 2.0 ** jnp.arange(WAVES)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        waves = waves.reshape(*places.shape[:-1], -1)
        y = waves
        for layer in range(DEPTH):
            if layer == SKIP:
                y = jnp.concatenate([y, waves.astype(y.dtype)], -1)
            y = nn.relu(nn.Dense(self.width, dtype=self.dtype)(y))
        y = nn.Dense(4, dtype=self.dtype)(y)
        colours, density = nn.sigmoid(y[..., :3]), nn.softplus(y[..., 3])
        opaque = 1 - jnp.exp(-density * STEP)
        seen = jnp.cumprod(1 - opaque + 1e-10, -1)
        before = jnp.concatenate([jnp.ones_like(seen[..., :1]), seen[..., :-1]], -1)
        return ((opaque * before)[..., None] * colours).sum(-2)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    rng = np.random.default_rng(0)
    shape = chosen.rays, chosen.places, 3
    return Subject(
        model=lambda dtype, train: Nerf(chosen.width, dtype),
        inputs=rng.standard_normal(shape, np.float32),
        targets=rng.random((chosen.rays, 3), np.float32),
        loss=squared_error,
        optimizer="adamw",
    )
