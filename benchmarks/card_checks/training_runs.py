"""The examples that train, in float32 and 16 bits, from three seeds each."""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rivals import LOW

import jamp
from card_checks import Figures, Part, attempt

DTYPES = ("float32", *LOW)
SEEDS = (0, 1, 2)
LAST = 20  # steps whose mean loss is the final one


class Steps(NamedTuple):
    """One step, or several that ran as one program: then each array has as many rows.

    Attributes:
      losses: the losses by name.
      scales: the scale of each optimizer.
      skipped: whether each optimizer skipped the step.
      timed: whether the time between two of these is that of the steps.
    """

    losses: dict[str, Any]
    scales: tuple[Any, ...] = ()
    skipped: tuple[Any, ...] = ()
    timed: bool = True


# From a seed: the steps of a run, then what was measured at its end.
Run = Callable[[int], Iterator[Steps | Figures]]


def after(losses: dict[str, Any], *opt_states: Any) -> Steps:
    """A step and what scaling made of it."""
    return Steps(
        losses,
        tuple(map(jamp.loss_scale, opt_states)),
        tuple(map(jamp.last_step_skipped, opt_states)),
    )


def digits_run(dtype: str, tiny: bool) -> Run:
    import digits

    train_data, test_data = digits.load_data()
    epochs, options = 1 if tiny else 12, options_of(dtype)
    num_steps = epochs * (len(train_data.labels) // digits.BATCH_SIZE)
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, num_steps))
    scaled = dtype == "float16"
    if scaled:
        optimizer = jamp.dynamic_loss_scaling(optimizer)
        train_step = scaled_step_of_digits(optimizer, options)
    else:
        train_step = digits.make_train_step(optimizer, options)

    def run(seed: int) -> Iterator[Steps | Figures]:
        init = jax.jit(digits.MODEL.init, static_argnames="train")
        variables = init(jax.random.key(seed), train_data.images[:1], train=True)
        params = variables["params"]
        state = digits.TrainState(
            params, variables["batch_stats"], optimizer.init(params)
        )
        for batch in digits.batches(train_data, epochs, seed):
            state, loss = train_step(state, batch)
            yield after({"loss": loss}, *([state.opt_state] if scaled else []))
        yield {"accuracy": digits.measure_accuracy(state, test_data, options)}

    return run


def options_of(dtype: str) -> Figures:
    return {"device_type": "gpu", "dtype": dtype, "enabled": dtype != "float32"}


def scaled_step_of_digits(optimizer: Any, options: Figures) -> Callable[..., Any]:
    """The example's step, with the loss scaled."""
    import digits

    value_and_grad = jamp.value_and_grad(
        jamp.autocast(digits.loss_fn, **options), has_aux=True
    )

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        (loss, stats), grads = value_and_grad(state.opt_state, *state[:2], batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return digits.TrainState(params, stats, opt_state), loss

    return train_step


def resnet_run(dtype: str, tiny: bool) -> Run:
    import resnet

    train_data, test_data = resnet.load_data()
    epochs, train_step = 1 if tiny else 15, resnet.make_train_step(dtype)

    def run(seed: int) -> Iterator[Steps | Figures]:
        state = resnet.create(dtype, train_data.images[:1], seed)
        for batch in resnet.batches(train_data, epochs, seed):
            state, loss = train_step(state, batch)
            yield after({"loss": loss}, state.opt_state)
        yield {"accuracy": resnet.measure_accuracy(state, test_data, dtype)}

    return run


def char_transformer_run(dtype: str, tiny: bool) -> Run:
    import char_transformer as example

    depth, num_steps = (1, 12) if tiny else (2, 600)
    train_step = example.make_train_step(dtype)

    def run(seed: int) -> Iterator[Steps | Figures]:
        model = example.create(depth, seed)
        optimizer = example.make_optimizer(model, dtype, num_steps)
        for letters in example.batches(num_steps, seed):
            scalars = train_step(model, optimizer, letters)
            yield Steps(
                {"loss": scalars["loss"]},
                (scalars["loss_scale"],),
                (~np.isfinite(scalars["grad_norm"]),),
            )

    return run


def lstm_run(dtype: str, tiny: bool) -> Run:
    import lstm

    def run(seed: int) -> Iterator[Steps | Figures]:
        metrics = lstm.train(100 if tiny else 1000, dtype, seed)
        yield Steps(
            {"loss": metrics["loss"]},
            (metrics["loss_scale"],),
            (~np.isfinite(metrics["grad_norm"]),),
            timed=False,
        )

    return run


def gan_run(dtype: str, tiny: bool) -> Run:
    import gan

    data, _ = gan.load_data()
    epochs = 1 if tiny else 150

    def run(seed: int) -> Iterator[Steps | Figures]:
        players = gan.create(dtype, seed)
        for step, batch in enumerate(gan.batches(data, epochs, seed)):
            key = jax.random.key(step)
            players, losses = gan.train_step(players, batch.images, key, dtype)
            yield after(losses, *(player.opt_state for player in players))
        yield {"distance": gan.distance(players, dtype, data)}

    return run


def distributed_run(dtype: str, tiny: bool) -> Run:
    import distributed

    num_steps = 12 if tiny else 40
    ways = {
        "data parallel": (distributed.jit_step, distributed.everywhere, None),
        "fully sharded": (distributed.jit_step, distributed.rows, None),
        "shard_map": (distributed.shard_map_step, distributed.rows, distributed.AXIS),
    }

    def run(seed: int) -> Iterator[Steps | Figures]:
        for name, way in ways.items():
            result = distributed.train(*way, num_steps, dtype, seed)
            yield {f"loss, {name}": result.loss, f"skipped, {name}": result.skipped}

    return run


EXAMPLES: dict[str, Callable[[str, bool], Run]] = {
    "gan": gan_run,
    "char_transformer": char_transformer_run,
    "digits": digits_run,
    "resnet": resnet_run,
    "lstm": lstm_run,
    "distributed": distributed_run,
}


def record(run: Iterator[Steps | Figures]) -> Figures:
    """Runs a training and returns its figures."""
    rows: list[Any] = []
    seconds, final, start = [], {}, time.perf_counter()
    for found in run:
        if isinstance(found, dict):
            final |= found
            continue
        jax.block_until_ready(found.losses)
        rows.append((found.losses, found.scales, found.skipped))
        now = time.perf_counter()
        if found.timed:
            seconds.append(now - start)
        start = now
    if not rows:
        return final
    losses, scales, skipped = jax.tree.map(
        lambda *arrays: np.concatenate([*map(np.atleast_1d, arrays)]),
        *jax.device_get(rows),
    )
    means = {name: float(np.mean(values[-LAST:])) for name, values in losses.items()}
    return {
        **final,
        **means,
        "scales": [changes(values) for values in scales],
        "skipped_steps": [int(np.sum(values)) for values in skipped],
        "total_steps": len(next(iter(losses.values()))),
        "median_step_seconds": statistics.median(seconds) if seconds else None,
        "timed_beside_others": True,
    }


def changes(values: np.ndarray) -> list[tuple[int, float]]:
    """The first value, and each that differs from the one before, with its step."""
    new = np.flatnonzero(np.diff(values)) + 1
    return [(int(step), float(values[step])) for step in (0, *new)]


def beside_float32(runs: dict[str, list[Figures]]) -> Figures:
    """By how much 16 bits end outside of what float32's seeds end between.

    For each figure and dtype, one number per seed: 0 within, negative below the least
    of float32's figures, positive above the greatest.
    """
    compared: Figures = {}
    for name, value in runs["float32"][0].items():
        if not isinstance(value, float) or name == "median_step_seconds":
            continue
        values = {
            dtype: [run[name] for run in found if name in run]
            for dtype, found in runs.items()
        }
        low, high = min(values["float32"]), max(values["float32"])
        outside = {
            dtype: [x - low if x < low else x - high if x > high else 0.0 for x in xs]
            for dtype, xs in values.items()
            if dtype != "float32"
        }
        compared[name] = {"values": values, "spread": high - low, "outside": outside}
    return compared


def summary(compared: Figures, runs: dict[str, list[Figures]]) -> str:
    """How many of the runs in 16 bits end within float32's spread."""
    parts = [
        f"{name} (spread {found['spread']:.2g}): "
        + ", ".join(
            f"{dtype} {sum(x == 0 for x in xs)} of {len(xs)} within"
            + (f", furthest {max(xs, key=abs):+.2g}" if any(xs) else "")
            for dtype, xs in found["outside"].items()
        )
        for name, found in compared.items()
    ]
    errors = [
        run["error"] for found in runs.values() for run in found if "error" in run
    ]
    return "; ".join([*errors[:1], *parts])


def part(name: str) -> Part:
    """The runs of an example, one seed after another, its dtypes side by side."""

    def figures(size: str) -> Iterator[Figures]:
        runs: dict[str, list[Figures]] = {dtype: [] for dtype in DTYPES}
        prepared: dict[str, Run] = {}

        def one(seed: int, dtype: str) -> Figures:
            if dtype not in prepared:
                prepared[dtype] = EXAMPLES[name](dtype, size == "tiny")
            return {"seed": seed, **record(prepared[dtype](seed))}

        with ThreadPoolExecutor(len(DTYPES)) as pool:
            for seed in SEEDS:
                found = pool.map(partial(attempt, one, seed), DTYPES)
                for dtype, run in zip(DTYPES, found, strict=True):
                    runs[dtype].append(run)
                compared = beside_float32(runs)
                yield {
                    "summary": summary(compared, runs),
                    "beside_float32": compared,
                    "runs": runs,
                }

    return figures
