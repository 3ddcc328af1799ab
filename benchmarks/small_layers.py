"""What autocast gains, or costs, in small networks, whose steps take microseconds.

Six dense layers with biases and relu, of few features, are applied to some rows, and
trained on them. Each is timed in turn as written and under autocast. Reported are the
medians, in seconds, and the median of the ratios of the pairs.
"""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

import jamp

WIDTHS = (32, 64, 128, 256, 512)
ROWS = (1, 4, 16, 32, 64, 128, 256)
MODES = ("inference", "training")
LAYERS = 6
PAIRS = 15

Layers = list[tuple[jax.Array, jax.Array]]


def network(layers: Layers, x: jax.Array) -> jax.Array:
    for weight, bias in layers:
        x = jax.nn.relu(x @ weight + bias)
    return x


def make_programs(width: int, rows: int, mode: str) -> list[tuple[Any, Any]]:
    """The program as written and under autocast, and their arguments."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = [
        (jax.random.normal(key, (width, width)) / width**0.5, jnp.zeros(width))
        for key in keys
    ]
    x = jax.random.normal(keys[0], (rows, width))

    def program(apply: Any) -> Any:
        def loss(layers: Layers, x: jax.Array) -> jax.Array:
            return jnp.mean(apply(layers, x).astype(jnp.float32) ** 2)

        fn = jax.grad(loss) if mode == "training" else apply
        return jax.jit(fn).lower(layers, x).compile()

    return [(program(fn), (layers, x)) for fn in (network, jamp.autocast(network))]


def measure(mode: str, width: int, rows: int) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    name = f"{mode}, {width} features, {rows} rows"
    medians = time_pairs(make_programs(width, rows, mode), PAIRS, name)
    return {"mode": mode, "width": width, "rows": rows} | medians


def main() -> None:
    figures = [measure(*of) for of in product(MODES, WIDTHS, ROWS)]
    for mode in MODES:
        table = Table("features", *(f"{rows} rows" for rows in ROWS), title=mode)
        for width in WIDTHS:
            found = [
                row for row in figures if (row["mode"], row["width"]) == (mode, width)
            ]
            table.add_row(str(width), *(f"{row['ratio']:.2f}" for row in found))
        Console().print(table)
    print(f"written: {write_results('small_layers', {'layers': figures})}")


if __name__ == "__main__":
    main()
