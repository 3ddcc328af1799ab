"""Train a small convolutional network twice: in float32, and under autocast.

Both runs start from the same weights and see the same batches. The model and the
optimizer know nothing of mixed precision: the one line that turns it on is the
`jamp.autocast` around the loss function. The weights, their gradients, the optimizer's
state and BatchNorm's running statistics stay float32 in both.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

# The arguments of `jamp.autocast` in each run. bfloat16 has float32's range: it needs
# no loss scaling, unlike float16, the default on GPUs.
RUNS = {"float32": {"enabled": False}, "autocast": {"dtype": jnp.bfloat16}}
BATCH_SIZE = 128
FIGURE = Path(__file__).parent / "output" / "digits.png"


class Batch(NamedTuple):
    images: np.ndarray  # float32[batch, 8, 8, 1], from 0 to 1
    labels: np.ndarray  # int[batch]


class TrainState(NamedTuple):
    params: dict
    batch_stats: dict
    opt_state: optax.OptState


class Result(NamedTuple):
    accuracy: float  # on the test images
    losses: list[float]  # of every step
    step_seconds: float  # the median
    temp_bytes: int  # what the compiled step needs beside its arguments and results
    low_flop_share: float  # of the matrix products and convolutions in 16 bits


class DigitNet(nn.Module):
    """Two convolutions with BatchNorm and two dense layers; nothing names a dtype."""

    features: tuple[int, int] = (32, 64)
    hidden: int = 1024

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in self.features:
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(10)(x)


MODEL = DigitNet()


def loss_fn(params: dict, batch_stats: dict, batch: Batch) -> tuple[jax.Array, dict]:
    logits, updates = MODEL.apply(
        {"params": params, "batch_stats": batch_stats},
        batch.images,
        train=True,
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), updates["batch_stats"]


def predict(params: dict, batch_stats: dict, images: jax.Array) -> jax.Array:
    variables = {"params": params, "batch_stats": batch_stats}
    return MODEL.apply(variables, images, train=False).argmax(axis=-1)


def make_train_step(optimizer: optax.GradientTransformation, options: dict) -> Callable:
    """A jitted step of training whose loss is computed under autocast."""
    value_and_grad = jax.value_and_grad(jamp.autocast(loss_fn, **options), has_aux=True)

    @jax.jit
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        (loss, batch_stats), grads = value_and_grad(*state[:2], batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, batch_stats, opt_state), loss

    return train_step


def load_data() -> tuple[Batch, Batch]:
    """The handwritten digits of scikit-learn, one in five of them held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    parts = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return Batch(parts[0], parts[2]), Batch(parts[1], parts[3])


def batches(data: Batch, epochs: int, seed: int) -> Iterator[Batch]:
    """Full batches, in an order that depends on the seed alone."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(data.labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            yield Batch(data.images[chosen], data.labels[chosen])


def measure_accuracy(state: TrainState, data: Batch, options: dict) -> float:
    predicted = jax.jit(jamp.autocast(predict, **options))(
        state.params, state.batch_stats, data.images
    )
    return float(np.mean(predicted == data.labels))


def median_seconds(steps: dict, state: TrainState, batch: Batch, rounds: int) -> dict:
    """Times one step of each run in turn, so that a slow moment slows them all."""
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(state, batch))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def train_both(epochs: int, seed: int, timing_rounds: int) -> dict[str, Result]:
    """Trains once per entry of RUNS, from the same start, and measures each."""
    train_data, test_data = load_data()
    batch = next(batches(train_data, 1, seed))
    num_steps = epochs * (len(train_data.labels) // BATCH_SIZE)
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, num_steps))

    variables = MODEL.init(jax.random.key(seed), batch.images, train=True)
    params, batch_stats = variables["params"], variables["batch_stats"]
    start = TrainState(params, batch_stats, optimizer.init(params))
    steps = {
        name: make_train_step(optimizer, options).lower(start, batch).compile()
        for name, options in RUNS.items()
    }
    seconds = median_seconds(steps, start, batch, timing_rounds)

    results = {}
    for name, options in RUNS.items():
        state, losses = start, []
        progress = track(batches(train_data, epochs, seed), name, total=num_steps)
        for train_batch in progress:
            state, loss = steps[name](state, train_batch)
            losses.append(float(loss))
        report = jamp.explain(loss_fn, **options)(params, batch_stats, batch)
        results[name] = Result(
            accuracy=measure_accuracy(state, test_data, options),
            losses=losses,
            step_seconds=seconds[name],
            temp_bytes=steps[name].memory_analysis().temp_size_in_bytes,
            low_flop_share=report.low_flop_share,
        )
    return results


def make_table(results: dict[str, Result]) -> Table:
    rows = {
        "test accuracy": lambda r: f"{r.accuracy:.2%}",
        "median step time": lambda r: f"{r.step_seconds * 1e3:.1f} ms",
        "temporary memory of a step": lambda r: f"{r.temp_bytes / 2**20:.1f} MiB",
        "matmul and conv FLOPs in 16 bits": lambda r: f"{r.low_flop_share:.1%}",
    }
    table = Table("", *results)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, show in rows.items():
        table.add_row(label, *map(show, results.values()))
    return table


def what_it_shows(results: dict[str, Result], slow: bool) -> str:
    """Which rows to look at; `slow` is whether 16 bits save no time here."""
    shown = "Both runs learn the same, and every product of autocast's is in 16 bits."
    if slow:
        return (
            f"{shown} The step time is not what to look at: this processor has no "
            "instructions for 16-bit products."
        )
    share = results["autocast"].step_seconds / results["float32"].step_seconds
    gain = "a gain" if share < 1 else "no gain for a network this small"
    return f"{shown} Its step takes {share:.2f} of float32's time here: {gain}."


def save_figure(results: dict[str, Result], path: Path) -> None:
    """Draws both loss curves: each step's loss faintly, their moving average on top."""
    figure = Figure(figsize=(7, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    looks = [("tab:blue", 4.0, "-"), ("tab:red", 1.5, "--")]
    for (name, result), (color, width, dashes) in zip(
        results.items(), looks, strict=True
    ):
        losses = np.array(result.losses)
        window = min(11, len(losses))  # an epoch
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        middles = np.arange(len(smooth)) + (window + 1) / 2
        axes.plot(np.arange(len(losses)) + 1, losses, color=color, alpha=0.25, lw=1)
        axes.plot(middles, smooth, dashes, color=color, lw=width, label=name)
    axes.set(yscale="log", xlabel="training step", ylabel="cross-entropy loss")
    axes.set_title("Handwritten digits: training loss in float32 and under autocast")
    axes.grid(alpha=0.3)
    axes.legend(title="mean of 11 steps; faint: every step", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="3 epochs, little timing")
    args = parser.parse_args(argv)

    epochs, rounds = (3, 3) if args.quick else (args.epochs, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jamp.JampWarning)
        results = train_both(epochs, args.seed, rounds)
    # jamp warns, once, where 16 bits only cost time.
    slow = any(issubclass(warning.category, jamp.JampWarning) for warning in caught)
    save_figure(results, args.figure)
    Console().print(make_table(results))
    print(what_it_shows(results, slow))
    print(f"Loss curves: {args.figure}")
    return results


if __name__ == "__main__":
    main()
