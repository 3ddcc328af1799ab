"""The network of PyTorch's recipe for automatic mixed precision: Linear and ReLU."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from subjects._subject import Subject


class Size(NamedTuple):
    depth: int
    width: int
    batch: int


SIZES = {
    "tiny": Size(depth=3, width=16, batch=8),
    "cpu": Size(depth=3, width=1024, batch=512),
    "gpu": Size(depth=3, width=4096, batch=4096),
}


class Mlp(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.size.depth - 1):
            x = nn.relu(nn.Dense(self.size.width, dtype=self.dtype)(x))
        return nn.Dense(self.size.width, dtype=self.dtype)(x)


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    rng = np.random.default_rng(0)
    shape = (chosen.batch, chosen.width)
    return Subject(
        model=lambda dtype, train: Mlp(chosen, dtype),
        inputs=rng.standard_normal(shape, np.float32),
        targets=rng.standard_normal(shape, np.float32),
        loss=squared_error,
        optimizer="sgd",
    )
