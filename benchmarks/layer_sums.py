"""What it takes to round the sum of a product and its bias once, instead of twice.

A dense layer with a bias and gelu is timed in 16 bits in two forms: with a product that
is rounded before the bias is added, and with one in float32, so that the sum is rounded
once. autocast takes the second on CPUs. Which is faster on a GPU depends on whether XLA
puts the bias and the rounding into the product's own kernel. Reported are the medians,
in seconds, and the median of the ratios of the pairs, and the memory of each.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from alone import alone
from jax import lax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

# Rows, features that come in and features that go out.
LAYERS = {
    "cpu": [(512, 1024, 1024), (2048, 256, 1024), (2048, 1024, 256)],
    "gpu": [
        (8192, 768, 3072),
        (8192, 3072, 768),
        (8192, 4096, 4096),
        (16384, 768, 768),
    ],
}
MODES = ("inference", "training")
DTYPES = ("bfloat16",)
PAIRS = 15


def layer(wide: bool, x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    to = jnp.float32 if wide else x.dtype
    made = lax.dot(x, w.astype(x.dtype), preferred_element_type=to)
    return jax.nn.gelu((made + b.astype(to)).astype(x.dtype))


def trained(apply: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(apply(*arrays).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))


def measure(shape: tuple[int, int, int], mode: str, dtype: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    rows, taken, given = shape
    x = jax.random.normal(jax.random.key(0), (rows, taken), dtype)
    w = jax.random.normal(jax.random.key(1), (taken, given)) / taken**0.5
    arrays = x, w, jnp.ones(given)
    twice, once = (partial(layer, wide) for wide in (False, True))
    forms = map(trained, (twice, once)) if mode == "training" else (twice, once)
    compiled = [jax.jit(form).lower(*arrays).compile() for form in forms]
    memory = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    name = f"{rows} rows, {taken} to {given}, {mode}, {dtype}"
    medians = time_pairs([(c, arrays) for c in compiled], PAIRS, name)
    row = {"shape": shape, "mode": mode, "dtype": dtype, "temporary_bytes": memory}
    return row | medians


def main() -> None:
    layers = LAYERS["gpu" if jax.default_backend() == "gpu" else "cpu"]
    with alone(math.inf):
        figures = [measure(*of) for of in product(layers, MODES, DTYPES)]
    table = Table("rows", "in", "out", "mode", "dtype", "once, relative to twice")
    for row in figures:
        sizes = map(str, row["shape"])
        table.add_row(*sizes, row["mode"], row["dtype"], f"{row['ratio']:.2f}")
    Console().print(table)
    print(f"written: {write_results('layer_sums', {'layers': figures})}")


if __name__ == "__main__":
    main()
