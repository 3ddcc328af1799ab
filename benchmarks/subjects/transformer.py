"""A decoder like GPT-2, with a head tied to the embedding and without dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import jamp
from subjects._subject import Subject, cross_entropy, make_text


class Size(NamedTuple):
    depth: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(depth=1, width=16, heads=2, vocabulary=32, batch=2, length=8),
    "cpu": Size(depth=4, width=384, heads=6, vocabulary=4096, batch=4, length=256),
    "gpu": Size(depth=12, width=768, heads=12, vocabulary=50304, batch=8, length=1024),
}


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any = None, **_: Any
) -> jax.Array:
    """For `nn.MultiHeadDotProductAttention`; a mask is taken for the causal one."""
    dtype = jamp.get_autocast_dtype()
    return jax.nn.dot_product_attention(
        *(x.astype(dtype) for x in (query, key, value)),
        is_causal=mask is not None,
        implementation="cudnn",
    )


class Block(nn.Module):
    heads: int
    dtype: Any
    attention: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        attend = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, attention_fn=self.attention
        )
        x = x + attend(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Transformer(nn.Module):
    size: Size
    dtype: Any
    attention: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        embed = nn.Embed(size.vocabulary, size.width, dtype=dtype)
        positions = nn.Embed(size.length, size.width, dtype=dtype)
        x = embed(tokens) + positions(jnp.arange(size.length))
        mask = nn.make_causal_mask(tokens)
        for _ in range(size.depth):
            x = Block(size.heads, dtype, self.attention)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=dtype)(x))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Transformer(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
        fused=lambda dtype, train: Transformer(chosen, dtype, cudnn_attention),
    )
