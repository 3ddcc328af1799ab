"""A Swin transformer: attention in shifted windows, with a bias by relative place."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from subjects._subject import Subject, cross_entropy, make_images


class Size(NamedTuple):
    depth: int
    width: int
    heads: int
    window: int
    pixels: int
    classes: int
    batch: int


SIZES = {
    "tiny": Size(2, width=16, heads=2, window=2, pixels=16, classes=10, batch=2),
    "cpu": Size(4, width=96, heads=6, window=7, pixels=112, classes=1000, batch=4),
    "gpu": Size(4, width=192, heads=6, window=7, pixels=224, classes=1000, batch=64),
}


class WindowAttention(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        (batch, height, breadth, width), heads = x.shape, self.size.heads
        side = self.size.window
        places = side * side
        windows = x.reshape(batch, height // side, side, breadth // side, side, width)
        y = windows.swapaxes(2, 3).reshape(-1, places, width)
        y = nn.Dense(3 * width, dtype=self.dtype)(y)
        y = y.reshape(-1, places, heads, 3 * width // heads)
        query, key, value = jnp.split(y, 3, axis=-1)
        start = nn.initializers.normal(0.02)
        bias = self.param("bias", start, (heads, places, places))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
        shares = nn.softmax(scores + bias.astype(scores.dtype))
        y = jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(-1, places, width)
        y = nn.Dense(width, dtype=self.dtype)(y)
        y = y.reshape(batch, height // side, breadth // side, side, side, width)
        return y.swapaxes(2, 3).reshape(x.shape)


class Swin(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        width, dtype = self.size.width, self.dtype
        x = nn.Conv(width, (4, 4), strides=(4, 4), dtype=dtype)(images)
        for layer in range(self.size.depth):
            shift = self.size.window // 2 if layer % 2 else 0
            y = jnp.roll(nn.LayerNorm(dtype=dtype)(x), (-shift, -shift), (1, 2))
            y = WindowAttention(self.size, dtype)(y)
            x = x + jnp.roll(y, (shift, shift), (1, 2))
            y = nn.LayerNorm(dtype=dtype)(x)
            y = nn.gelu(nn.Dense(4 * width, dtype=dtype)(y))
            x = x + nn.Dense(width, dtype=dtype)(y)
        x = nn.LayerNorm(dtype=dtype)(x).mean((1, 2))
        return nn.Dense(self.size.classes, dtype=dtype)(x)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_images(chosen.batch, chosen.pixels, chosen.classes)
    return Subject(
        model=lambda dtype, train: Swin(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
