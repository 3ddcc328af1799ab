"""EfficientNet: inverted bottlenecks, BatchNorm, SiLU, squeeze and excitation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from subjects._subject import Subject, cross_entropy, make_images
from subjects.convnext import Size

SIZES = {
    "tiny": Size(depth=1, features=8, pixels=16, classes=10, batch=4),
    "cpu": Size(depth=4, features=24, pixels=64, classes=1000, batch=4),
    "gpu": Size(depth=4, features=64, pixels=224, classes=1000, batch=64),
}


class EfficientNet(nn.Module):
    size: Size
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        features, dtype = self.size.features, self.dtype
        norm: Callable[[], nn.Module] = partial(
            nn.BatchNorm, use_running_average=not self.train, dtype=dtype
        )
        conv = partial(nn.Conv, use_bias=False, dtype=dtype)
        x = nn.silu(norm()(conv(features, (3, 3), strides=(2, 2))(images)))
        for _ in range(self.size.depth):
            wide = 4 * features
            y = nn.silu(norm()(conv(wide, (1, 1))(x)))
            y = nn.silu(norm()(conv(wide, (3, 3), feature_group_count=wide)(y)))
            squeezed = y.mean((1, 2), keepdims=True)
            squeezed = nn.silu(nn.Dense(features // 4, dtype=dtype)(squeezed))
            y = y * nn.sigmoid(nn.Dense(wide, dtype=dtype)(squeezed))
            x = x + norm()(conv(features, (1, 1))(y))
        return nn.Dense(self.size.classes, dtype=dtype)(x.mean((1, 2)))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_images(chosen.batch, chosen.pixels, chosen.classes)
    return Subject(
        model=lambda dtype, train: EfficientNet(chosen, dtype, train),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="sgd",
    )
