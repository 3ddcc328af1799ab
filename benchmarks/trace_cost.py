"""What autocast adds to tracing and lowering a training step, and inference.

For each network and depth, `value_and_grad` of the loss, or the loss alone, is traced
and lowered in turn as written and under autocast, from empty caches; with `--warm`,
with what JAX has kept of the traces before, as for the second program of a process.
Reported are the medians, in seconds of processor time, and the median of the ratios of
the pairs. The networks are a transformer, and one of dense layers and relu, which is
little to trace as written.
"""

import argparse
import gc
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from results_file import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from timing import medians_of_pairs

import jamp

DEPTHS = (3, 6, 12, 24)
MODES = {"training": jax.value_and_grad, "inference": lambda loss: loss}
PAIRS = 11
WIDTH = 64
VOCABULARY = 128


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(y))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(nn.Dense(WIDTH)(x))


class Network(nn.Module):
    kind: type[nn.Module]
    depth: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(self.depth):
            x = self.kind()(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


NETWORKS: dict[str, type[nn.Module]] = {"transformer": Block, "relu": Layer}


def make_loss(
    network: str, depth: int
) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    """The loss of a network, its parameters and a batch of tokens."""
    model = Network(NETWORKS[network], depth)
    tokens = jnp.zeros((2, 32), jnp.int32)
    params = model.init(jax.random.key(0), tokens)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean()

    return loss, params, tokens


def seconds(
    function: Callable[..., Any], params: Any, tokens: jax.Array, warm: bool
) -> float:
    """Processor time of tracing and lowering a function, as if it were a new one."""
    if not warm:
        jax.clear_caches()
    gc.collect()
    jitted = jax.jit(lambda *arguments: function(*arguments))
    start = time.process_time()
    jitted.trace(params, tokens).lower()
    return time.process_time() - start


def measure(network: str, depth: int, mode: str, warm: bool) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    loss, params, tokens = make_loss(network, depth)
    transform = MODES[mode]
    pairs = []
    for _ in track(range(PAIRS + 1), f"{network}, depth {depth}, {mode}"):
        plain, cast = (
            seconds(transform(fn), params, tokens, warm)
            for fn in (loss, jamp.autocast(loss))
        )
        pairs.append((plain, cast))
    del pairs[0]
    named = {"network": network, "depth": depth, "mode": mode}
    return named | medians_of_pairs(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true", help="keep JAX's caches")
    warm = parser.parse_args().warm
    figures = [measure(*row, warm) for row in product(NETWORKS, DEPTHS, MODES)]
    columns = "network depth mode float32 autocast ratio".split()
    table = Table(*columns, "autocast per layer")
    for row in figures:
        table.add_row(
            row["network"],
            str(row["depth"]),
            row["mode"],
            f"{row['float32_seconds']:.2f} s",
            f"{row['autocast_seconds']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['autocast_seconds'] / row['depth'] * 1e3:.0f} ms",
        )
    Console().print(table)
    name = "trace_cost-warm" if warm else "trace_cost"
    print(f"written: {write_results(name, {'depths': figures})}")


if __name__ == "__main__":
    main()
