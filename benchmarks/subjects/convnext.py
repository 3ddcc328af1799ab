"""ConvNeXt: depthwise convolutions, LayerNorm, wide layers, a scale of each layer."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from subjects._subject import Subject, cross_entropy, make_images


class Size(NamedTuple):
    depth: int
    features: int
    pixels: int
    classes: int
    batch: int


SIZES = {
    "tiny": Size(depth=1, features=8, pixels=16, classes=10, batch=2),
    "cpu": Size(depth=4, features=64, pixels=64, classes=1000, batch=4),
    "gpu": Size(depth=4, features=192, pixels=224, classes=1000, batch=64),
}


class ConvNext(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        features, dtype = self.size.features, self.dtype
        x = nn.Conv(features, (4, 4), strides=(4, 4), dtype=dtype)(images)
        x = nn.LayerNorm(dtype=dtype)(x)
        for layer in range(self.size.depth):
            depthwise = nn.Conv(
                features, (7, 7), feature_group_count=features, dtype=dtype
            )
            y = nn.LayerNorm(dtype=dtype)(depthwise(x))
            y = nn.gelu(nn.Dense(4 * features, dtype=dtype)(y))
            y = nn.Dense(features, dtype=dtype)(y)
            start = nn.initializers.constant(1e-2)
            scale = self.param(f"scale_{layer}", start, (features,))
            x = x + scale.astype(y.dtype) * y
        x = nn.LayerNorm(dtype=dtype)(x.mean((1, 2)))
        return nn.Dense(self.size.classes, dtype=dtype)(x)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_images(chosen.batch, chosen.pixels, chosen.classes)
    return Subject(
        model=lambda dtype, train: ConvNext(chosen, dtype),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="adamw",
    )
