"""WaveNet: causal dilated convolutions of a sound, gated, with residuals and skips."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from subjects._subject import Subject, cross_entropy

LEVELS = 256  # of a sample


class Size(NamedTuple):
    depth: int
    features: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(depth=2, features=8, batch=2, length=16),
    "cpu": Size(depth=8, features=48, batch=4, length=2000),
    "gpu": Size(depth=8, features=128, batch=8, length=16000),
}


class WaveNet(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, sound: jax.Array) -> jax.Array:
        features, dtype = self.size.features, self.dtype
        x = nn.Dense(features, dtype=dtype)(sound[..., None])
        skips = []
        for layer in range(self.size.depth):
            conv = nn.Conv(
                2 * features,
                (2,),
                kernel_dilation=2**layer,
                padding="CAUSAL",
                dtype=dtype,
            )
            signal, gate = jnp.split(conv(x), 2, axis=-1)
            y = jnp.tanh(signal) * nn.sigmoid(gate)
            skips.append(nn.Dense(features, dtype=dtype)(y))
            x = x + nn.Dense(features, dtype=dtype)(y)
        y = nn.relu(nn.Dense(features, dtype=dtype)(nn.relu(sum(skips))))
        return nn.Dense(LEVELS, dtype=dtype)(y)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    rng = np.random.default_rng(0)
    shape = chosen.batch, chosen.length
    return Subject(
        model=lambda dtype, train: WaveNet(chosen, dtype),
        inputs=rng.standard_normal(shape, np.float32),
        targets=rng.integers(LEVELS, size=shape, dtype=np.int32),
        loss=cross_entropy,
        optimizer="adamw",
    )
