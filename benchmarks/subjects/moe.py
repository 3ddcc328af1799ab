"""A decoder whose wide layers are experts: each token goes to the best two."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from subjects._subject import Subject, cross_entropy, make_text

BEST = 2  # experts for each token


class Size(NamedTuple):
    depth: int
    width: int
    heads: int
    experts: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(1, 16, heads=2, experts=2, vocabulary=32, batch=2, length=8),
    "cpu": Size(2, 128, heads=8, experts=8, vocabulary=2000, batch=2, length=128),
    "gpu": Size(2, 512, heads=8, experts=8, vocabulary=32000, batch=4, length=512),
}


class Experts(nn.Module):
    count: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        count, width = self.count, x.shape[-1]
        tokens = x.reshape(-1, width)
        room = BEST * len(tokens) // count
        shares = nn.softmax(nn.Dense(count, dtype=jnp.float32)(tokens))
        best, chosen = lax.top_k(shares, BEST)
        goes = jax.nn.one_hot(chosen, count)
        rows = goes.reshape(-1, count).astype(jnp.int32)
        order = (jnp.cumsum(rows, 0) * rows - 1).reshape(goes.shape)
        places = goes[..., None] * jax.nn.one_hot(order, room)
        combined = (places * best[..., None, None]).sum(1)
        start = nn.initializers.lecun_normal()
        first = self.param("first", start, (count, width, 2 * width))
        second = self.param("second", start, (count, 2 * width, width))
        arrays = tokens, places.sum(1), combined, first, second
        tokens, places, combined, first, second = nn.dtypes.promote_dtype(
            *arrays, dtype=self.dtype
        )
        y = jnp.einsum("td,tec->ecd", tokens, places)
        y = nn.gelu(jnp.einsum("ecd,edf->ecf", y, first))
        y = jnp.einsum("ecf,efd->ecd", y, second)
        return jnp.einsum("ecd,tec->td", y, combined).reshape(x.shape)


class Moe(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.width, dtype=dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(size.depth):
            y = nn.LayerNorm(dtype=dtype)(x)
            attend = nn.MultiHeadDotProductAttention(size.heads, dtype=dtype)
            x = x + attend(y, mask=mask)
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + Experts(size.experts, dtype)(y)
        return nn.Dense(size.vocabulary, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Moe(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
