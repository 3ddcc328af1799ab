"""What autocast gains by the number of rows that a network is given.

Eight dense layers are applied to a few rows, as to the next token of some texts, or to
many: with float32 weights, which autocast casts in each call; with weights that are
stored in bfloat16; and in a loop, before which the float32 weights are cast once. Each
is timed in turn as written and under autocast. Reported are the medians, in seconds,
and the median of the ratios of the pairs.
"""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import time_pairs

import jamp

ROWS = (1, 2, 8, 32, 128, 512)
LAYERS, WIDTH, STEPS = 8, 1024, 16
PAIRS = 9
FORMS = ("float32 weights", "bfloat16 weights", "in a loop")


def network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = x + jax.nn.relu(x @ weight)
    return x


def steps(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(network(weights, x)), None

    return lax.scan(step, x, None, length=STEPS)[0]


def make_programs(rows: int, form: str) -> list[tuple[Any, Any]]:
    """The program as written and under autocast, and their arguments."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys]
    x = jax.random.normal(keys[0], (rows, WIDTH))
    stored = weights
    if form == "bfloat16 weights":
        stored = [weight.astype(jnp.bfloat16) for weight in weights]
    fn = steps if form == "in a loop" else network
    pairs = (fn, (weights, x)), (jamp.autocast(fn), (stored, x))
    return [(jax.jit(f).lower(*args).compile(), args) for f, args in pairs]


def measure(rows: int, form: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    medians = time_pairs(make_programs(rows, form), PAIRS, f"{rows} rows, {form}")
    return {"rows": rows, "form": form} | medians


def main() -> None:
    figures = [measure(*of) for of in product(ROWS, FORMS)]
    table = Table("rows", *FORMS)
    for rows in ROWS:
        ratios = (f"{row['ratio']:.2f}" for row in figures if row["rows"] == rows)
        table.add_row(str(rows), *ratios)
    Console().print(table)
    print(f"written: {write_results('rows', {'rows': figures})}")


if __name__ == "__main__":
    main()
