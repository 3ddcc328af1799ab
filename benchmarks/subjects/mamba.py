"""Mamba: state spaces that the input selects, computed by an associative scan."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from subjects._subject import Subject, cross_entropy, make_text


class Size(NamedTuple):
    depth: int
    width: int
    states: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(1, width=16, states=2, vocabulary=32, batch=2, length=8),
    "cpu": Size(2, width=128, states=8, vocabulary=2000, batch=4, length=128),
    "gpu": Size(2, width=512, states=8, vocabulary=32000, batch=8, length=512),
}


class StateSpace(nn.Module):
    states: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = x.shape[-1], self.dtype
        start = nn.initializers.zeros
        rates = -jnp.exp(self.param("rates", start, (width, self.states)))
        low_rank = nn.Dense(width // 16, dtype=dtype)(x)
        step = nn.softplus(nn.Dense(width, dtype=dtype)(low_rank))[..., None]
        into, out = (nn.Dense(self.states, dtype=dtype)(x) for _ in range(2))
        decay = jnp.exp(step * rates.astype(x.dtype))
        taken = step * x[..., None] * into[:, :, None]
        held = lax.associative_scan(_after, (decay, taken.astype(decay.dtype)), axis=1)
        return (held[1] * out[:, :, None]).sum(-1) + x


def _after(first: Any, second: Any) -> Any:
    return first[0] * second[0], second[0] * first[1] + second[1]


class Mamba(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        (_, width, states, vocabulary, *_), dtype = self.size, self.dtype
        x = nn.Embed(vocabulary, width, dtype=dtype)(tokens)
        for _ in range(self.size.depth):
            y = nn.RMSNorm(dtype=dtype)(x)
            y = nn.Dense(4 * width, use_bias=False, dtype=dtype)(y)
            y, gate = jnp.split(y, 2, axis=-1)
            conv = nn.Conv(
                2 * width,
                (4,),
                padding="CAUSAL",
                feature_group_count=2 * width,
                dtype=dtype,
            )
            y = StateSpace(states, dtype)(nn.silu(conv(y)))
            y = nn.Dense(width, use_bias=False, dtype=dtype)(y * nn.silu(gate))
            x = x + y
        return nn.Dense(vocabulary, dtype=dtype)(nn.RMSNorm(dtype=dtype)(x))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Mamba(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
