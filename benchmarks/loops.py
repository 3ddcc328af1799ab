"""What autocast costs and gains in loops, by their length.

Each loop is a `jax.lax.scan`: a recurrence written by hand, products of what it goes
over, two recurrent layers of Flax, and layers of a transformer, one after the other.
The gradient of its loss, around autocast or inside of it, and the loss alone, are timed
in turn as written and under autocast. Reported are the medians, in seconds, the median
of the ratios of the pairs, and the temporary memory of the compiled programs.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from timing import cells, compare

import jamp

Function = Callable[..., Any]
# A program of a loss, given what is put around what is to run under autocast.
MODES: dict[str, Callable[[Function, Callable[[Function], Function]], Function]] = {
    "training": lambda loss, around: jax.grad(around(loss)),
    "gradient inside": lambda loss, around: around(jax.grad(loss)),
    "inference": lambda loss, around: around(loss),
}
PAIRS = 9
BATCH, WIDTH = 16, 128
LENGTHS = {
    "recurrence": (64, 256, 1024),
    "products": (64, 256, 1024),
    "LSTM": (64, 256, 1024),
    "GRU": (64, 256, 1024),
    "transformer": (4, 16),
}


def recurrence(weights: jax.Array, xs: jax.Array) -> jax.Array:
    final, _ = lax.scan(lambda h, x: (jnp.tanh(x + h @ weights), None), xs[0], xs)
    return final


def products(weights: jax.Array, xs: jax.Array) -> jax.Array:
    return lax.map(lambda x: x @ weights, xs)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y), None


def make_model(name: str, length: int) -> tuple[Callable[..., jax.Array], Any, Any]:
    """A loop as a function of parameters and inputs, the parameters and inputs."""
    key = jax.random.key(0)
    xs = jax.random.normal(key, (length, BATCH, WIDTH))
    weights = jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
    if name == "recurrence":
        return recurrence, weights, xs
    if name == "products":
        return products, weights, xs
    if name == "transformer":
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=length,
        )()
        x = jax.random.normal(key, (4, 64, WIDTH))
        variables = layers.init(key, x, None)
        return lambda v, x: layers.apply(v, x, None)[0], variables, x
    cell = nn.OptimizedLSTMCell(WIDTH) if name == "LSTM" else nn.GRUCell(WIDTH)
    layer = nn.RNN(cell, time_major=True)
    return layer.apply, layer.init(key, xs), xs


def measure(name: str, length: int, mode: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    model, params, inputs = make_model(name, length)

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        return jnp.mean(model(params, inputs) ** 2)

    programs = [
        jax.jit(MODES[mode](loss, around)).lower(params, inputs).compile()
        for around in (lambda fn: fn, jamp.autocast)
    ]

    named = {"loop": name, "length": length, "mode": mode}
    description = f"{name}, length {length}, {mode}"
    return named | compare(programs, (params, inputs), PAIRS, description)


def main() -> None:
    rows = [(name, length) for name, lengths in LENGTHS.items() for length in lengths]
    figures = [measure(*row, mode) for row, mode in product(rows, MODES)]
    table = Table("loop", "length", "mode", "float32", "autocast", "time", "memory")
    for row in figures:
        table.add_row(row["loop"], str(row["length"]), row["mode"], *cells(row))
    Console().print(table)
    print(f"written: {write_results('loops', {'loops': figures})}")


if __name__ == "__main__":
    main()
