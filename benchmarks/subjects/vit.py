"""A vision transformer with a class token, of the blocks of the decoder."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from subjects._subject import Subject, cross_entropy, make_images
from subjects.transformer import Block


class Size(NamedTuple):
    depth: int
    width: int
    heads: int
    patch: int
    pixels: int
    classes: int
    batch: int


SIZES = {
    "tiny": Size(depth=1, width=16, heads=2, patch=4, pixels=8, classes=10, batch=2),
    "cpu": Size(
        depth=4, width=384, heads=6, patch=16, pixels=224, classes=1000, batch=8
    ),
    "gpu": Size(
        depth=12, width=768, heads=12, patch=16, pixels=224, classes=1000, batch=128
    ),
}


class Vit(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        patch = (size.patch, size.patch)
        x = nn.Conv(size.width, patch, strides=patch, dtype=dtype)(images)
        x = x.reshape(x.shape[0], -1, size.width)
        token = self.param("class", nn.initializers.zeros, (1, 1, size.width))
        token = jnp.broadcast_to(token, (x.shape[0], 1, size.width)).astype(x.dtype)
        x = jnp.concatenate([token, x], axis=1)
        place = nn.initializers.normal(0.02)
        x = x + self.param("place", place, x.shape[1:]).astype(x.dtype)
        for _ in range(size.depth):
            x = Block(size.heads, dtype)(x)
        x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(size.classes, dtype=dtype)(x[:, 0])


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_images(chosen.batch, chosen.pixels, chosen.classes)
    return Subject(
        model=lambda dtype, train: Vit(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
