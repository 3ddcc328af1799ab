"""What autocast gains by how matrices and pictures lie, as people write their layers.

Small networks that differ in little else are timed in turn as written, in float32, and
under autocast, in inference and with the gradients of their weights. Reported are the
medians, in seconds, the median of the ratios of the pairs, and temporary memory
relative to float32's.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

import jamp

PAIRS = 25
MODES = ("inference", "gradients")
Layer = Callable[[jax.Array, jax.Array], jax.Array]


class Network(NamedTuple):
    """Layers with relu behind each.

    Attributes:
      layer: applies weights to the array that it takes first.
      inputs: the shape of what comes in.
      weights: those of the weights.
    """

    layer: Layer
    inputs: tuple[int, ...]
    weights: list[tuple[int, ...]]


def convolution(order: str) -> Layer:
    numbers = (order, "HWIO" if order == "NHWC" else "OIHW", order)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    return convolve


def side_by_side(x: jax.Array, w: jax.Array) -> jax.Array:
    """What a dense block hands on: what came in, and new features beside it."""
    return jnp.concatenate([x, convolution("NHWC")(x, w)], -1)


def by_columns(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w.T


SQUARES = [(512, 512)] * 4
NETWORKS = {
    "x @ w": Network(jnp.matmul, (256, 512), SQUARES),
    "x @ w.T": Network(by_columns, (256, 512), SQUARES),
    "w @ x of each row": Network(
        jax.vmap(lambda x, w: w @ x, (0, None)), (256, 512), SQUARES
    ),
    "a vocabulary, transposed": Network(
        by_columns, (512, 256), [(256, 256), (4096, 256)]
    ),
    "wide, then narrow": Network(
        jnp.matmul, (2048, 384), [(384, 1536), (1536, 384)] * 2
    ),
    "features last": Network(
        convolution("NHWC"), (8, 32, 32, 64), [(3, 3, 64, 64)] * 3
    ),
    "features first": Network(
        convolution("NCHW"), (8, 64, 32, 32), [(64, 64, 3, 3)] * 3
    ),
    "32 features of many pictures": Network(
        convolution("NHWC"), (64, 32, 32, 32), [(3, 3, 32, 32)] * 3
    ),
    "16 features beside others": Network(
        side_by_side, (8, 28, 28, 32), [(3, 3, 32 + 16 * i, 16) for i in range(6)]
    ),
}


def make_programs(network: Network, mode: str) -> list[tuple[Any, Any]]:
    """A network compiled in float32 and under autocast, and what it takes."""
    rng = np.random.default_rng(0)
    shapes = [network.inputs, *network.weights]
    drawn = [rng.standard_normal(shape, np.float32) for shape in shapes]
    x, *weights = map(jnp.asarray, drawn)
    weights = [w / w[0].size ** 0.5 for w in weights]

    def apply(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(network.layer(x, w))
        return x

    def gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32) ** 2))

    compiled = []
    for fn in (apply, jamp.autocast(apply)):
        run = fn if mode == "inference" else gradients(fn)
        compiled.append((jax.jit(run).lower(weights, x).compile(), (weights, x)))
    return compiled


def measure(name: str, mode: str) -> dict[str, Any]:
    programs = make_programs(NETWORKS[name], mode)
    needed = [run.memory_analysis().temp_size_in_bytes for run, _ in programs]
    memory = {"memory_ratio": needed[1] / needed[0] if needed[0] else None}
    timed = time_pairs(programs, PAIRS, f"{name}, {mode}")
    return {"network": name, "mode": mode} | timed | memory


def main() -> None:
    figures = [measure(*row) for row in product(NETWORKS, MODES)]
    table = Table("network", "mode", "time", "memory")
    for row in figures:
        memory = row["memory_ratio"]
        shown = f"{row['ratio']:.2f}", "-" if memory is None else f"{memory:.2f}"
        table.add_row(row["network"], row["mode"], *shown)
    Console().print(table)
    print(f"written: {write_results('layouts', {'networks': figures})}")


if __name__ == "__main__":
    main()
