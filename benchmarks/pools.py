"""What training gains at max pools: XLA's gradient for CPUs against that of autocast.

Each pool, with its gradient, is timed in turn in float32 as written and under autocast,
of bfloat16 as a convolution before it gives. Reported are the medians, in seconds, the
median of the ratios of the pairs, and temporary memory relative to float32's.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

import jamp

PAIRS = 9


class Pool(NamedTuple):
    shape: tuple[int, ...]  # of the pictures, with their features last
    size: int
    stride: int
    padding: str


POOLS = {
    "ResNet, behind the first convolution": Pool((8, 112, 112, 64), 3, 2, "SAME"),
    "VGG, second": Pool((8, 112, 112, 128), 2, 2, "VALID"),
    "Inception, inside a block": Pool((8, 28, 28, 192), 3, 1, "SAME"),
    "digits, first": Pool((128, 26, 26, 32), 2, 2, "VALID"),
    "volumes": Pool((2, 32, 32, 32, 16), 2, 2, "VALID"),
}


def make_programs(pool: Pool) -> list[tuple[Any, Any]]:
    """Values and gradients in float32 and under autocast, and their arguments."""
    dims = len(pool.shape) - 2

    def loss(x: jax.Array) -> jax.Array:
        window, strides = (pool.size,) * dims, (pool.stride,) * dims
        pooled = nn.max_pool(x, window, strides, pool.padding)
        return jnp.sum(pooled.astype(jnp.float32) ** 2)

    x = jax.random.normal(jax.random.key(0), pool.shape)
    pairs = (loss, x), (jamp.autocast(loss), x.astype(jnp.bfloat16))
    return [
        (jax.jit(jax.value_and_grad(fn)).lower(x).compile(), (x,)) for fn, x in pairs
    ]


def measure(name: str) -> dict[str, Any]:
    programs = make_programs(POOLS[name])
    needed = [run.memory_analysis().temp_size_in_bytes for run, _ in programs]
    memory = {"memory_ratio": needed[1] / needed[0]}
    return {"pool": name} | time_pairs(programs, PAIRS, name) | memory


def main() -> None:
    figures = list(map(measure, POOLS))
    table = Table("pool", "time", "memory")
    for row in figures:
        ratios = (f"{row[key]:.2f}" for key in ("ratio", "memory_ratio"))
        table.add_row(row["pool"], *ratios)
    Console().print(table)
    print(f"written: {write_results('pools', {'pools': figures})}")


if __name__ == "__main__":
    main()
