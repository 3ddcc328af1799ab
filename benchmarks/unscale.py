"""Checks and times the unscaling kernels on the GPU that is there, in about 8 minutes.

Writes the figures, and which implementation was the fastest for which size, to
pallas_kernels/unscale/measured.json: `implementation='auto'` goes by this file. Without
a GPU, `--programs` compiles for an H200 and counts the kernels that a program becomes.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradient_trees
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import unscale_check
from results_file import RESULTS, environment, write_json, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from unscale_rivals import PROGRAMS, TorchFused, copied, loop

MEASURED = Path(__file__).parents[1] / "pallas_kernels" / "unscale" / "measured.json"
LEAVES = (1, 4, 16, 64, 256, 1024, 4096)  # MiB
TREES = {"large_and_tiny": gradient_trees.large_and_tiny, **gradient_trees.MODELS}
ROUNDS = 7
# What has to be won over XLA to be worth a kernel.
MARGIN = 1.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", action="store_true", help="compile, time nothing")
    parser.add_argument("--largest", type=int, default=4096, help="leaf, in MiB")
    arguments = parser.parse_args()
    if arguments.programs:
        show_programs()
        return
    # PyTorch needs some of the GPU's memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this needs an NVIDIA GPU; the device is {device}")
    checks = unscale_check.check_on_card()
    leaves = {f"{size} MiB": gradient_trees.one_leaf(size) for size in LEAVES}
    leaves = {
        k: v
        for k, v in leaves.items()
        if gradient_trees.bytes_of(v) <= arguments.largest << 20
    }
    trees = {name: make() for name, make in TREES.items()}
    rows = []
    for name, tree in track({**leaves, **trees}.items(), "cases"):
        rows.append({"case": name, **measure(tree)})
        save({"checks": checks, "cases": rows}, trees, device.device_kind)
    show(rows)
    draw(rows, RESULTS / f"unscale-{device.device_kind.replace(' ', '-')}.png")


def measure(tree: gradient_trees.Tree) -> dict[str, Any]:
    """Seconds of every rival for one tree, and its bandwidth beside that of a copy."""
    size = gradient_trees.bytes_of(tree)
    repeats = max(3, min(1000, (4 << 30) // max(size, 1 << 20)))
    calls: dict[str, Callable[[], float]] = {}
    failures = {}
    rivals = {name: lambda name=name: timed(name, tree, repeats) for name in PROGRAMS}
    rivals["torch"] = lambda: TorchFused(tree, repeats).seconds
    rivals["torch (CUDA graph)"] = lambda: TorchFused(tree, repeats, graph=True).seconds
    rivals["copy"] = lambda: copied(size, repeats)
    for name, make in rivals.items():
        try:
            calls[name] = make()
            calls[name]()
        except Exception as error:  # noqa: BLE001 - one rival's failure is a result
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            calls.pop(name, None)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            seconds[name].append(call())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # Every rival reads and writes all bytes, the copy too, but what only checks.
    moved = {name: 1 if name.startswith("all_finite") else 2 for name in medians}
    copy = medians.get("copy")
    return {
        "leaves": len(tree),
        "bytes": size,
        "seconds": medians,
        "gigabytes_per_second": {
            name: moved[name] * size / time / 1e9 for name, time in medians.items()
        },
        "of_copy_bandwidth": {
            name: moved[name] / 2 * copy / time for name, time in medians.items()
        }
        if copy
        else {},
        "failures": failures,
    }


def timed(name: str, tree: gradient_trees.Tree, repeats: int) -> Callable[[], float]:
    """A call that runs a program `repeats` times on the device; seconds of one."""
    key = jax.random.key(0)
    leaves = [jax.random.normal(key, leaf.shape, leaf.dtype) for leaf in tree.values()]
    run = loop(PROGRAMS[name], repeats).lower(leaves, jnp.float32(1)).compile()
    state = [leaves]

    def call() -> float:
        start = time.perf_counter()
        state[0], found = run(state[0], jnp.float32(1))
        if bool(found):  # waits for the device
            raise AssertionError(f"{name} found an inf where there is none")
        return (time.perf_counter() - start) / repeats

    return call


def save(
    figures: dict[str, Any], trees: dict[str, gradient_trees.Tree], card: str
) -> None:
    """Writes measured.json: the figures of this card, and what is the fastest."""
    fastest = []
    for row in figures["cases"]:
        if row["case"] not in trees or "xla" not in row["seconds"]:
            continue
        seconds = {k: v for k, v in row["seconds"].items() if k in PROGRAMS}
        seconds = {k: v for k, v in seconds.items() if not k.startswith("all_finite")}
        best = min(seconds, key=seconds.__getitem__)
        # A kernel that differs from the reference anywhere is never chosen.
        wrong = figures["checks"].get(best, {}).get("differences")
        won = seconds["xla"] > MARGIN * seconds[best] and not wrong
        fastest.append((row["bytes"], best if won and best != "per_leaf" else "xla"))
    content = {
        "environment": environment(),
        "fastest": {card: sorted(fastest)},
        "figures": figures,
    }
    write_json(MEASURED, content)


def show(rows: list[dict[str, Any]]) -> None:
    rivals = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = Table("case", "leaves", *rivals, title="share of the bandwidth of a copy")
    for row in rows:
        shares = [row["of_copy_bandwidth"].get(name) for name in rivals]
        cells = ["-" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(row["case"], str(row["leaves"]), *cells)
    Console().print(table)
    print(f"written: {MEASURED}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the share of the copy bandwidth for every case."""
    rivals = [name for name in rows[0]["of_copy_bandwidth"] if name != "copy"]
    rivals = [name for name in rivals if not name.startswith("all_finite")]
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    places = np.arange(len(rows))
    width = 0.8 / len(rivals)
    for k, name in enumerate(rivals):
        shares = [row["of_copy_bandwidth"].get(name, 0) for row in rows]
        axes.bar(
            places + (k - len(rivals) / 2 + 0.5) * width, shares, width, label=name
        )
    axes.axhline(0.9, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(places, [row["case"] for row in rows])
    axes.set_ylabel("share of the bandwidth of a copy")
    axes.legend(ncols=len(rivals), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    figure.savefig(path, dpi=150)


def show_programs() -> None:
    """Counts what the programs become when they are compiled for an H200."""
    from unscale_programs import programs

    rows = programs(gradient_trees.MODELS)
    table = Table("tree", "leaves", "program", "kernels", "in place", "compilation")
    for row in rows:
        table.add_row(
            row["tree"],
            str(row["leaves"]),
            row["program"],
            str(row["kernels"]),
            f"{row['bytes_in_place'] / row['bytes']:.0%}",
            f"{row['compile_seconds']:.1f} s",
        )
    Console().print(table)
    print(f"written: {write_results('unscale_programs', {'programs': rows})}")


if __name__ == "__main__":
    main()
