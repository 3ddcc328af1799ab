"""What autocast gains and costs in small networks of many kinds.

Nothing in jamp was made for one of them. The gradients of a loss, and the network
alone, are timed in turn as written and under autocast. Reported are the medians, in
seconds, the median of the ratios of the pairs, the temporary memory of the compiled
programs, and how far results and gradients are from those of float32: the norm of the
difference, relative to theirs.
"""

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax
from results_file import write_results
from rich.console import Console
from rich.table import Table
from small_networks import NETWORKS, Network
from timing import cells, compare

import jamp

MODES = ("training", "inference")
PAIRS = 11


def program(
    network: Network, mode: str, around: Callable[..., Any]
) -> Callable[..., Any]:
    """The gradients of a network, or what it returns."""
    if mode == "inference":
        return around(network.apply)
    loss = around(lambda params, *x: network.loss(network.apply(params, *x)))
    return jax.grad(loss)


def distance(found: Any, expected: Any) -> float:
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), found)
    wrong = jax.tree.map(jnp.subtract, wide, expected)
    return float(optax.tree.norm(wrong) / optax.tree.norm(expected))


def measure(name: str, mode: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    network = NETWORKS[name]()
    arguments = network.params, *network.inputs
    programs = [
        jax.jit(program(network, mode, around)).lower(*arguments).compile()
        for around in (lambda fn: fn, jamp.autocast)
    ]
    expected, found = (compiled(*arguments) for compiled in programs)
    return {
        "network": name,
        "mode": mode,
        **compare(programs, arguments, PAIRS, f"{name}, {mode}"),
        "distance": distance(found, expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    chosen = parser.parse_args().only
    figures = [measure(*of) for of in product(chosen, MODES)]
    columns = "float32", "autocast", "time", "memory", "distance"
    table = Table("network", "mode", *columns)
    for row in figures:
        distant = f"{row['distance']:.4f}"
        table.add_row(row["network"], row["mode"], *cells(row), distant)
    Console().print(table)
    if len(chosen) == len(NETWORKS):
        print(f"written: {write_results('networks', {'networks': figures})}")


if __name__ == "__main__":
    main()
