"""Trains small models written with other people's packages, under autocast and not.

Each program runs in a process of its own, in float32, in bfloat16 by the cpu's policy
and in float16 by the gpu's, with dynamic loss scaling. Reported are the losses, the
share of the FLOPs that autocast put into 16 bits, and what stays in float32 and why.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ecosystem_programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ecosystem_programs import Computation, Program, Training
from results_file import installed_version, results_path, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jamp

SECONDS = 600
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"enabled": False},
    "bfloat16": {"device_type": "cpu"},
    "float16": {"device_type": "gpu"},
}


def train(case: Training, dtype: str) -> list[float]:
    """The loss before each step and after the last."""
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
        return optax.apply_updates(params, updates), state, value

    params, state, losses = case.params, tx.init(case.params), []
    for _ in range(case.steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return [*losses, float(jax.jit(loss)(params, case.batch))]


def compute(case: Computation, dtype: str) -> list[float]:
    """All floating numbers of the result."""
    result = jax.jit(jamp.autocast(case.fn, **OPTIONS[dtype]))(*case.args)
    floating = [
        np.asarray(leaf, np.float64).ravel()
        for leaf in jax.tree.leaves(result)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    found: list[float] = np.concatenate(floating).tolist()
    return found


def run(case: Training | Computation, dtype: str) -> dict[str, Any]:
    """What a program computes in one dtype, or the error that it raises."""
    try:
        numbers = (train if isinstance(case, Training) else compute)(case, dtype)
    except Exception as error:  # noqa: BLE001 - the error is the figure
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
    return {"numbers": numbers}


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
    for dtype in OPTIONS:
        figures[dtype] = run(case, dtype)
    for dtype in ("bfloat16", "float16"):
        if "error" not in figures[dtype]:
            figures[dtype] |= explanation(case, dtype)
            figures[dtype]["difference"] = difference(figures, dtype)
    for dtype in OPTIONS:
        numbers = figures[dtype].pop("numbers", None)
        if numbers and figures["kind"] == "training":
            figures[dtype] |= {"first": numbers[0], "last": numbers[-1]}
    return figures


def difference(figures: dict[str, Any], dtype: str) -> float | None:
    """How far the outcome is from float32's.

    For a training, the difference of the last losses relative to what float32 gained;
    for a computation, that of its numbers relative to the largest.
    """
    if "error" in figures["float32"]:
        return None
    wanted = np.array(figures["float32"]["numbers"])
    found = np.array(figures[dtype]["numbers"])
    if figures["kind"] == "training":
        scale = abs(wanted[0] - wanted[-1])
        return float((found[-1] - wanted[-1]) / scale)
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


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
