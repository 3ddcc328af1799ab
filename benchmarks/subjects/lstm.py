"""A language model of stacked LSTM layers."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from subjects._subject import Subject, cross_entropy, make_text


class Size(NamedTuple):
    depth: int
    width: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(depth=1, width=16, vocabulary=32, batch=2, length=6),
    "cpu": Size(depth=2, width=256, vocabulary=4096, batch=32, length=64),
    "gpu": Size(depth=2, width=1024, vocabulary=8192, batch=128, length=256),
}


class Lstm(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.width, dtype=dtype)(tokens)
        for _ in range(size.depth):
            x = nn.RNN(nn.OptimizedLSTMCell(size.width, dtype=dtype))(x)
        return nn.Dense(size.vocabulary, dtype=dtype)(x)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_text(chosen.vocabulary, chosen.batch, chosen.length)
    return Subject(
        model=lambda dtype, train: Lstm(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
