"""The network of one convolution in the documentation of autocast for CPUs."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from subjects._subject import Subject


class Size(NamedTuple):
    batch: int
    pixels: int
    inputs: int
    outputs: int


SIZES = {
    "tiny": Size(batch=2, pixels=8, inputs=4, outputs=8),
    "cpu": Size(batch=8, pixels=224, inputs=64, outputs=128),
    "gpu": Size(batch=64, pixels=224, inputs=64, outputs=128),
}


class SimpleNet(nn.Module):
    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Conv(
            self.size.outputs,
            (3, 3),
            strides=2,
            padding=1,
            use_bias=False,
            dtype=self.dtype,
        )(x)


def make(size: str) -> Subject:
    chosen = SIZES[size]
    shape = (chosen.batch, chosen.pixels, chosen.pixels, chosen.inputs)
    return Subject(
        model=lambda dtype, train: SimpleNet(chosen, dtype),
        inputs=np.random.default_rng(0).random(shape, np.float32),
        targets=None,
        loss=lambda outputs, targets: outputs.mean(),
        optimizer="sgd",
    )
