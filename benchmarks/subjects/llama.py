"""A decoder like Llama: RMSNorm, rotary positions, a gated layer, tied embeddings."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from subjects._subject import Subject, cross_entropy, make_text
from subjects.transformer import Size

SIZES = {
    "tiny": Size(depth=2, width=16, heads=2, vocabulary=32, batch=2, length=8),
    "cpu": Size(depth=4, width=256, heads=4, vocabulary=2000, batch=4, length=128),
    "gpu": Size(depth=4, width=1024, heads=16, vocabulary=32000, batch=8, length=1024),
}


def rotated(x: jax.Array) -> jax.Array:
    """Heads of queries or keys, turned by their positions in a text."""
    length, size = x.shape[1], x.shape[-1]
    frequencies = 1e4 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None, None] * frequencies
    cos, sin = (fn(angles).astype(x.dtype) for fn in (jnp.cos, jnp.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


class Block(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]

        def dense(features: int) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=self.dtype)

        y = nn.RMSNorm(dtype=self.dtype)(x)
        heads = (*y.shape[:2], self.heads, width // self.heads)
        query, key, value = (dense(width)(y).reshape(heads) for _ in range(3))
        mask = nn.make_causal_mask(jnp.ones(y.shape[:2]))
        y = nn.dot_product_attention(
            rotated(query), rotated(key), value, mask=mask, dtype=self.dtype
        )
        x = x + dense(width)(y.reshape(x.shape))
        y = nn.RMSNorm(dtype=self.dtype)(x)
        return x + dense(width)(nn.silu(dense(3 * width)(y)) * dense(3 * width)(y))


class Llama(nn.Module):
    size: Size
    dtype: Any
    scanned: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        embed = nn.Embed(size.vocabulary, size.width, dtype=dtype)
        x = embed(tokens)
        if self.scanned:
            layers = nn.scan(
                nn.remat(_Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=size.depth,
            )
            x, _ = layers(size.heads, dtype)(x, None)
        else:
            for _ in range(size.depth):
                x = Block(size.heads, dtype)(x)
        return embed.attend(nn.RMSNorm(dtype=dtype)(x))


class _Layer(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.heads, self.dtype)(x), None


def make(size: str, scanned: bool = False) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Llama(chosen, dtype, scanned),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
