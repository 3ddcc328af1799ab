"""A GRU over a text that looks, place by place, at one that read it both ways."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from subjects._subject import Subject, cross_entropy, make_text


class Size(NamedTuple):
    width: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(width=8, vocabulary=32, batch=2, length=4),
    "cpu": Size(width=256, vocabulary=2000, batch=8, length=32),
    "gpu": Size(width=1024, vocabulary=32000, batch=64, length=64),
}


class Gru(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, dtype = self.size.width, self.dtype

        def layer() -> nn.RNN:
            return nn.RNN(nn.GRUCell(width, dtype=dtype))

        x = nn.Embed(self.size.vocabulary, width, dtype=dtype)(tokens)
        read = nn.Bidirectional(layer(), layer())(x)
        written = layer()(x)
        query = nn.Dense(2 * width, dtype=dtype)(written)
        scores = jnp.einsum("btd,bsd->bts", query, read) * (2 * width) ** -0.5
        seen = jnp.einsum("bts,bsd->btd", nn.softmax(scores), read)
        y = nn.Dense(width, dtype=dtype)(jnp.concatenate([seen, written], -1))
        return nn.Dense(self.size.vocabulary, dtype=dtype)(jnp.tanh(y))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Gru(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
