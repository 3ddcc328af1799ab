"""Trains small models written with other people's packages, under autocast and not.

Each program runs in a process of its own, in float32, in bfloat16 by the cpu's policy
and in float16 by the gpu's, with dynamic loss scaling. Reported are the losses, the
steps that loss scaling skipped, the share of the FLOPs that autocast put into 16 bits,
and what stays in float32 and why; and how far float32 itself ends from where it ended
if what it starts from is rounded, as in bfloat16, in five other ways.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ecosystem_programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ecosystem_programs import Computation, Program, Training
from results_file import first_line, installed_version, results_path, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jamp

SECONDS = 600
NUDGES = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"enabled": False},
    "bfloat16": {"device_type": "cpu"},
    "float16": {"device_type": "gpu"},
}


def train(case: Training, dtype: str, starts: list[Any]) -> Iterator[dict[str, Any]]:
    """From each start, the loss before each step and after the last."""
    tx: Any = optax.adam(case.learning_rate)
    if dtype == "float16":
        tx = jamp.dynamic_loss_scaling(tx)
    loss = jamp.autocast(case.loss, **OPTIONS[dtype])
    gradient = jamp.value_and_grad(loss) if dtype == "float16" else None

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        if gradient is None:
            value, grads = jax.value_and_grad(loss)(params, case.batch)
        else:
            value, grads = gradient(state, params, case.batch)
        updates, state = tx.update(grads, state, params)
        skipped = jamp.last_step_skipped(state) if gradient else False
        return optax.apply_updates(params, updates), state, value, skipped

    last = jax.jit(loss)
    for params in starts:
        state, losses, skipped = tx.init(params), [], 0
        for _ in range(case.steps):
            params, state, value, skip = step(params, state)
            losses.append(float(value))
            skipped += int(skip)
        losses.append(float(last(params, case.batch)))
        yield {"numbers": losses} | ({"skipped": skipped} if gradient else {})


def compute(
    case: Computation, dtype: str, starts: list[Any]
) -> Iterator[dict[str, Any]]:
    """From each start, all floating numbers of the result."""
    fn = jax.jit(jamp.autocast(case.fn, **OPTIONS[dtype]))
    for args in starts:
        floating = [
            np.asarray(leaf, np.float64).ravel()
            for leaf in jax.tree.leaves(fn(*args))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        yield {"numbers": np.concatenate(floating).tolist()}


def nudged(start: Any, seed: int) -> Any:
    """A start whose numbers are changed by as little as rounding to bfloat16 does."""
    draw = np.random.default_rng(seed).uniform

    def nudge(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        return leaf * jnp.asarray(1 + draw(-1, 1, leaf.shape) / 2**9, dtype)

    return jax.tree.map(nudge, start)


def run(case: Training | Computation, dtype: str, nudges: int) -> list[dict[str, Any]]:
    """What a program computes in one dtype, also if nudged, or the error it raises."""
    training = isinstance(case, Training)
    start = case.params if training else case.args
    starts = [start, *(nudged(start, seed) for seed in range(nudges))]
    try:
        return list((train if training else compute)(case, dtype, starts))
    except Exception as error:  # noqa: BLE001 - the error is the figure
        return [{"error": first_line(error)}]


def explanation(case: Training | Computation, dtype: str) -> dict[str, Any]:
    """The share of FLOPs in 16 bits, and why matrix products are in float32."""
    if isinstance(case, Training):
        fn, args = case.loss, (case.params, case.batch)
    else:
        fn, args = case.fn, case.args
    report = jamp.explain(fn, **OPTIONS[dtype])(*args).to_dict()
    wide = Counter[str]()
    for found in report["operations"]:
        if found["flops"] and "float32" in found["operands"]:
            wide[f"{found['primitive']}: {found['source']}"] += found["flops"]
    return {
        "low_flop_share": report["figures"]["low_flop_share"],
        "matmuls": report["figures"]["matmuls"],
        "low_matmuls": report["figures"]["low_matmuls"],
        "float32_flops": dict(wide.most_common(3)),
        "unknown": report["unknown"],
    }


def measure(program: Program) -> dict[str, Any]:
    """The figures of one program."""
    figures: dict[str, Any] = {
        "distribution": program.distribution,
        "version": installed_version(program.distribution),
        "area": program.make.__module__.rpartition(".")[2],
        "what": (program.make.__doc__ or "").strip(),
    }
    case = program.make()
    figures["kind"] = type(case).__name__.lower()
    figures["float32"], *others = run(case, "float32", NUDGES)
    wanted = figures["float32"].get("numbers")
    if others:
        away = [difference(found["numbers"], wanted, case) for found in others]
        figures["float32"]["nudged"] = max(map(abs, away))
    for dtype in ("bfloat16", "float16"):
        (figures[dtype],) = run(case, dtype, 0)
        if "error" not in figures[dtype]:
            figures[dtype] |= explanation(case, dtype)
        if wanted and "error" not in figures[dtype]:
            numbers = figures[dtype]["numbers"]
            figures[dtype]["difference"] = difference(numbers, wanted, case)
    for dtype in OPTIONS:
        numbers = figures[dtype].pop("numbers", None)
        if numbers and figures["kind"] == "training":
            figures[dtype] |= {"first": numbers[0], "last": numbers[-1]}
    return figures


def difference(
    numbers: list[float], wanted: list[float], case: Training | Computation
) -> float:
    """How far an outcome is from the one that is wanted.

    For a training, the difference of the last losses relative to what the wanted one
    gained; for a computation, that of its numbers relative to the largest.
    """
    if isinstance(case, Training):
        return (numbers[-1] - wanted[-1]) / abs(wanted[0] - wanted[-1])
    away = np.abs(np.subtract(numbers, wanted))
    return float(np.max(away) / np.max(np.abs(wanted)))


def in_process(name: str) -> dict[str, Any]:
    """The figures of one program, from a process of its own."""
    command = [sys.executable, __file__, "--here", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {"error": last[0][:300] if last else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, Any]) -> Table:
    made = Table("program", "float32", "bfloat16", "float16", "FLOPs in 16 bits")
    for name, found in results.items():
        if "error" in found:
            made.add_row(name, found["error"])
            continue
        cells = [cell(found[dtype]) for dtype in OPTIONS]
        share = found["bfloat16"].get("low_flop_share")
        made.add_row(name, *cells, "" if share is None else f"{share:.0%}")
    return made


def cell(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    shown = f"{found['first']:.4g} to {found['last']:.4g}" if "last" in found else ""
    if found.get("difference") is not None:
        shown += f" ({found['difference']:+.2%})"
    return shown or "runs"


def main(arguments: list[str] | None = None) -> None:
    programs = ecosystem_programs.load()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=programs, default=list(programs))
    parser.add_argument("--here", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.here:
        print(json.dumps(measure(programs[chosen.here])))
        return
    path = results_path("ecosystem")
    known = json.loads(path.read_text("utf-8"))["figures"] if path.exists() else {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        measured = pool.map(in_process, chosen.only)
        pairs = zip(chosen.only, measured, strict=True)
        for name, found in track(pairs, "programs", total=len(chosen.only)):
            known[name] = found
            # As it comes: the whole takes half an hour.
            ordered = {name: known[name] for name in programs if name in known}
            write_results("ecosystem", ordered)
    Console().print(table({name: known[name] for name in chosen.only}))


if __name__ == "__main__":
    main()
