"""ResNet-50 with BatchNorm, channels last."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from subjects._subject import Subject, cross_entropy, make_images


class Size(NamedTuple):
    stages: tuple[int, ...]
    width: int
    pixels: int
    classes: int
    batch: int


SIZES = {
    "tiny": Size(stages=(1,), width=4, pixels=16, classes=10, batch=2),
    "cpu": Size(stages=(3, 4, 6, 3), width=64, pixels=128, classes=1000, batch=8),
    "gpu": Size(stages=(3, 4, 6, 3), width=64, pixels=224, classes=1000, batch=128),
}


class Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm,
            use_running_average=not self.train,
            momentum=0.9,
            dtype=self.dtype,
        )
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride, padding=1)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    size: Size
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, dtype, train = self.size, self.dtype, self.train
        x = nn.Conv(
            size.width, (7, 7), strides=2, padding=3, use_bias=False, dtype=dtype
        )(images)
        x = nn.relu(
            nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=dtype)(x)
        )
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(size.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(size.width * 2**stage, stride, dtype, train)(x)
        return nn.Dense(size.classes, dtype=dtype)(x.mean(axis=(1, 2)))


def make(size: str) -> Subject:
    chosen = SIZES[size]
    inputs, targets = make_images(chosen.batch, chosen.pixels, chosen.classes)
    return Subject(
        model=lambda dtype, train: ResNet(chosen, dtype, train),
        inputs=inputs,
        targets=targets,
        loss=cross_entropy,
        optimizer="sgd",
    )
