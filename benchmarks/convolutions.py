"""What autocast gains in one convolution, by its kind, and in its two gradients.

Batches of eight pictures, as they are in known networks. Each convolution, the gradient
of its pictures and that of its weights are timed in turn as written and under autocast.
Reported are the medians, in seconds, and the median of the ratios of the pairs. Small
networks with depthwise convolutions or in groups are timed in training and inference.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

import jamp

PAIRS, BATCH = 9, 8
PARTS = ("forward", "pictures", "weights")


class Kind(NamedTuple):
    """A convolution of square pictures, channels last unless `first`."""

    pixels: int
    features: int
    out: int
    window: int
    stride: int = 1
    groups: int = 1
    first: bool = False

    def make(self) -> tuple[Callable[..., Any], Any, Any]:
        """The function, pictures and weights."""
        into = self.features // self.groups
        picture = (self.pixels, self.pixels)
        window = (self.window, self.window)
        if self.first:
            shape, numbers = (BATCH, self.features, *picture), ("NCHW", "OIHW", "NCHW")
            weights = (self.out, into, *window)
        else:
            shape, numbers = (BATCH, *picture, self.features), ("NHWC", "HWIO", "NHWC")
            weights = (*window, into, self.out)
        rng = np.random.default_rng(0)
        fn = partial(
            lax.conv_general_dilated,
            window_strides=(self.stride,) * 2,
            padding="SAME",
            dimension_numbers=numbers,
            feature_group_count=self.groups,
        )
        arrays = (rng.standard_normal(s, np.float32) for s in (shape, weights))
        return fn, *map(jax.device_put, arrays)


KINDS = {
    "224, 64 to 64, 3x3": Kind(224, 64, 64, 3),
    "56, 64 to 64, 3x3": Kind(56, 64, 64, 3),
    "56, 32 to 64, 3x3": Kind(56, 32, 64, 3),
    "28, 128 to 128, 3x3": Kind(28, 128, 128, 3),
    "14, 256 to 256, 3x3": Kind(14, 256, 256, 3),
    "56, 256 to 64, 1x1": Kind(56, 256, 64, 1),
    "112, 64 to 64, 3x3, stride 2": Kind(112, 64, 64, 3, 2),
    "224, 3 to 64, 7x7, stride 2": Kind(224, 3, 64, 7, 2),
    "224, 3 to 384, 16x16, stride 16": Kind(224, 3, 384, 16, 16),
    "56, 96 to 192, 2x2, stride 2": Kind(56, 96, 192, 2, 2),
    "depthwise 64, 96, 3x3": Kind(64, 96, 96, 3, 1, 96),
    "depthwise 64, 96, 3x3, stride 2": Kind(64, 96, 96, 3, 2, 96),
    "depthwise 64, 96, 3x3, channels first": Kind(64, 96, 96, 3, 1, 96, True),
    "depthwise 14, 576, 5x5": Kind(14, 576, 576, 5, 1, 576),
    "depthwise 7, 960, 3x3": Kind(7, 960, 960, 3, 1, 960),
    "depthwise 28, 192, 7x7": Kind(28, 192, 192, 7, 1, 192),
    "depthwise 64, 3, 7x7": Kind(64, 3, 3, 7, 1, 3),
    "28, 128 to 128 in 32 groups, 3x3": Kind(28, 128, 128, 3, 1, 32),
    "28, 256 to 256 in 32 groups, 3x3, stride 2": Kind(28, 256, 256, 3, 2, 32),
    "14, 512 to 512 in 32 groups, 3x3": Kind(14, 512, 512, 3, 1, 32),
    "14, 256 to 256 in 2 groups, 3x3": Kind(14, 256, 256, 3, 1, 2),
    "28, 64 to 128 in 64 groups, 3x3": Kind(28, 64, 128, 3, 1, 64),
}


class Inverted(nn.Module):
    """Blocks as in MobileNet: wider by a dense layer, depthwise, and back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3), (2, 2))(x)
        for out, stride in ((24, 2), (24, 1), (48, 2), (48, 1), (96, 2)):
            wide = nn.relu6(nn.GroupNorm(8)(nn.Conv(6 * x.shape[-1], (1, 1))(x)))
            conv = partial(nn.Conv, wide.shape[-1], (3, 3), (stride, stride))
            wide = nn.relu6(
                nn.GroupNorm(8)(conv(feature_group_count=wide.shape[-1])(wide))
            )
            y = nn.Conv(out, (1, 1))(wide)
            x = x + y if x.shape == y.shape else y
        return nn.Dense(100)(x.mean((1, 2)))


class ConvNext(nn.Module):
    """Blocks as in ConvNeXt: depthwise of large windows, LayerNorm, dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(96, (4, 4), (4, 4))(x))
        for width in (96, 96, 192, 192):
            if x.shape[-1] != width:
                x = nn.Conv(width, (2, 2), (2, 2))(nn.LayerNorm()(x))
            y = nn.LayerNorm()(nn.Conv(width, (7, 7), feature_group_count=width)(x))
            x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))
        return nn.Dense(100)(x.mean((1, 2)))


class InGroups(nn.Module):
    """Blocks as in ResNeXt: convolutions in 32 groups between dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (4, 4))(x)
        for width in (128, 256):
            for stride in (2, 1):
                y = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (1, 1))(x)))
                conv = nn.Conv(width, (3, 3), (stride, stride), feature_group_count=32)
                y = nn.relu(nn.GroupNorm(8)(conv(y)))
                y = nn.Conv(2 * width, (1, 1))(y)
                x = nn.relu(x + y if x.shape == y.shape else y)
        return nn.Dense(100)(x.mean((1, 2)))


NETWORKS = {"MobileNet": Inverted(), "ConvNeXt": ConvNext(), "ResNeXt": InGroups()}


def part(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A convolution or one of its gradients, of pictures, weights and cotangent."""
    if name == "forward":
        return lambda x, w, ct: fn(x, w)
    at = PARTS.index(name) - 1

    def gradient(x: Any, w: Any, ct: Any) -> Any:
        out, pull = jax.vjp(lambda of: fn(*((of, w), (x, of))[at]), (x, w)[at])
        return pull(ct.astype(out.dtype))

    return gradient


def of_convolution(kind: Kind, name: str) -> tuple[list[Callable[..., Any]], Any]:
    fn, x, w = kind.make()
    ct = jnp.ones(jax.eval_shape(fn, x, w).shape)
    return [part(f, name) for f in (fn, jamp.autocast(fn))], (x, w, ct)


def of_network(model: nn.Module, mode: str) -> tuple[list[Callable[..., Any]], Any]:
    x = np.random.default_rng(0).standard_normal((BATCH, 128, 128, 3), np.float32)
    params = model.init(jax.random.key(0), x)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    if mode == "inference":
        return [model.apply, jamp.autocast(model.apply)], (params, x)
    return [jax.value_and_grad(fn) for fn in (loss, jamp.autocast(loss))], (params, x)


def measure(fns: list[Callable[..., Any]], args: Any, what: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    args = jax.device_put(args)
    calls = [(jax.jit(fn).lower(*args).compile(), args) for fn in fns]
    return time_pairs(calls, PAIRS, what)


def main() -> None:
    figures = []
    for group, names, make in (
        (KINDS, PARTS, of_convolution),
        (NETWORKS, ("training", "inference"), of_network),
    ):
        table = Table("of float32", *names)
        for title, one in group.items():
            row = {n: measure(*make(one, n), f"{title}, {n}") for n in names}
            figures.append({"name": title, **row})
            table.add_row(title, *(f"{row[name]['ratio']:.2g}" for name in names))
        Console().print(table)
    print(f"written: {write_results('convolutions', {'convolutions': figures})}")


if __name__ == "__main__":
    main()
