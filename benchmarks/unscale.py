"""Checks and times the unscaling kernels on the GPU that is there.

Writes the figures, and which implementation was the fastest for which size, to
pallas_kernels/unscale/measured.json: `implementation='auto'` goes by this file. Without
a GPU, `--programs` compiles for an H200 and counts the kernels that a program becomes.
"""

import argparse
import faulthandler
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import gradient_trees
import matplotlib.pyplot as plt
import numpy as np
import unscale_check
from alone import alone, gpu
from results_file import (
    RESULTS,
    card_name,
    environment,
    first_line,
    write_json,
    write_results,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from unscale_programs import SCALE, Budget, Programs
from unscale_rivals import (
    PROGRAMS,
    State,
    TorchFused,
    copied,
    loop,
    timed,
    torch_with_gpu,
)

from jamp.pallas_kernels.unscale import backends

MEASURED = Path(__file__).parents[1] / "pallas_kernels" / "unscale" / "measured.json"
LEAVES = (1, 4, 16, 64, 256, 1024, 4096)  # MiB
TREES = {"large_and_tiny": gradient_trees.large_and_tiny, **gradient_trees.MODELS}
# About so many bytes are read in one call of a rival.
BYTES_READ = 4 << 30
ROUNDS, FEWEST_ROUNDS = 7, 3
HANGS_SECONDS = 120  # after which a step of it has to be taken for hung
# What has to be won over XLA to be worth a kernel.
MARGIN = 1.02

Cases = dict[str, gradient_trees.Tree]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", action="store_true", help="compile, time nothing")
    parser.add_argument("--largest", type=int, default=4096, help="leaf, in MiB")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="compile for half of it at most, and then time in fewer rounds",
    )
    arguments = parser.parse_args(argv)
    if arguments.programs:
        show_programs()
        return
    budget = Budget(arguments.budget)
    # PyTorch needs some of the GPU's memory too. JAX reads this when it looks for a
    # device, not when it is imported.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.5")
    device = gpu()
    trees = {name: make() for name, make in TREES.items()}
    leaves = {
        f"{size} MiB": gradient_trees.one_leaf(size)
        for size in LEAVES
        if size <= arguments.largest
    }
    with Programs(budget) as programs:
        add_programs(programs, trees, leaves)
        rows = run(programs, budget, trees, leaves, device.device_kind)
        show(rows)
        draw(rows, RESULTS / f"unscale-{card_name(device)}.png")


def add_programs(programs: Programs, trees: Cases, leaves: Cases) -> None:
    """Compiles everything, in the order of what a run without it would be worth."""

    def check(implementation: str, cases: Sequence[str]) -> None:
        for case in cases:
            unscale_check.add_program(programs, implementation, case)

    def time(rivals: Sequence[str], cases: Cases) -> None:
        for case, tree in cases.items():
            for rival in rivals:
                program = loop(PROGRAMS[rival], repeats(tree), at_once(tree))
                shapes = (list(tree.values()), SCALE)
                programs.add(("time", rival, case), program, *shapes, donate=0)

    checked = list(unscale_check.CASES)
    small = [case for case in checked if case in gradient_trees.SMALL]
    # What takes the longest to compile comes first among its like.
    check("xla", checked[::-1])
    check("triton", checked[::-1])
    time(("triton", "xla"), {**trees, **leaves})
    time(("per_leaf", "all_finite (xla)", "all_finite (triton)"), {**trees, **leaves})
    mosaic = ("mosaic_gpu", "all_finite (mosaic_gpu)")
    time(mosaic, leaves)
    check("mosaic_gpu", small)
    time(mosaic, trees)
    check("mosaic_gpu", [case for case in checked if case not in small])


def at_once(tree: gradient_trees.Tree) -> int:
    """How many repeats are compiled: of many leaves, each takes seconds."""
    most = max(2, BYTES_READ // gradient_trees.bytes_of(tree))
    return min(16, max(2, 64 // len(tree)), most)


def repeats(tree: gradient_trees.Tree) -> int:
    """How often a call runs a program on a tree."""
    # A launch for each leaf takes about as long as a MiB.
    size = max(gradient_trees.bytes_of(tree), len(tree) << 20)
    rounds = max(3, min(1000, BYTES_READ // size)) // at_once(tree)
    return max(1, rounds) * at_once(tree)


def run(
    programs: Programs, budget: Budget, trees: Cases, leaves: Cases, card: str
) -> list[dict[str, Any]]:
    """Checks, times and saves all cases while, and after, programs are compiled."""
    cases = {**trees, **leaves}
    numbers = np.resize(
        gradient_trees.of_every_size(np.dtype(np.float32)),
        max(leaf.size for tree in cases.values() for leaf in tree.values()),
    )
    torch = torch_with_gpu()  # takes seconds to import
    # Beside the compilations: each takes the seconds that JAX needs to start.
    with ThreadPoolExecutor() as pool:
        found = pool.map(unscale_check.why_not, backends.KERNELS)
    reasons = dict(zip(backends.KERNELS, found, strict=True))
    for kernel, why in reasons.items():
        if why:
            programs.refuse(kernel, "; ".join(why))
    programs.wait()
    print(f"{len(programs.seconds)} programs compiled after {budget.used():.0f} s")
    rows: list[dict[str, Any]] = []
    with alone(math.inf, poll=0.01):
        # Who hangs is not to keep the others from the card.
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        checks = unscale_check.check_on_card(programs, budget, reasons)
        for name, tree in track(cases.items(), "cases"):
            faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
            rows.append(
                {"case": name, **measure(name, tree, programs, budget, numbers)}
            )
            save({"checks": checks, "cases": rows}, trees, card)
            if torch:
                torch.cuda.empty_cache()
        faulthandler.cancel_dump_traceback_later()
    print(
        f"{programs.compiling()} programs still compiling after {budget.used():.0f} s"
    )
    return rows


def measure(
    name: str,
    tree: gradient_trees.Tree,
    programs: Programs,
    budget: Budget,
    numbers: np.ndarray,
) -> dict[str, Any]:
    """Seconds of every rival for one tree, and its bandwidth beside that of a copy."""
    size, times = gradient_trees.bytes_of(tree), repeats(tree)
    compiling = programs.compiling()
    state = State(tree, numbers)
    torch = cache(lambda: TorchFused(tree, times))
    rivals: dict[str, Callable[[], Callable[[], float]]] = {
        rival: lambda rival=rival: timed(
            programs.get(("time", rival, name)), state, times
        )
        for rival in PROGRAMS
    }
    rivals["torch"] = lambda: torch().eager()
    rivals["torch (CUDA graph)"] = lambda: torch().graph()
    rivals["copy"] = lambda: copied(size, times)
    seconds, failures = take_turns(rivals, budget)
    return {
        "leaves": len(tree),
        "bytes": size,
        **shares(size, seconds),
        "rounds": max(map(len, seconds.values()), default=0),
        "still_compiling": compiling,
        "failures": failures,
    }


def take_turns(
    rivals: dict[str, Callable[[], Callable[[], float]]], budget: Budget
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The seconds of all rounds by rival, and what failed instead."""
    calls: dict[str, Callable[[], float]] = {}
    seconds: dict[str, list[float]] = {}
    failures: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - one rival's failure is a result
            failures[name] = first_line(error)
            calls.pop(name, None)
            seconds.pop(name, None)

    def start(name: str) -> None:
        call = rivals[name]()
        call()
        calls[name], seconds[name] = call, []

    def clock(name: str) -> None:
        taken = calls[name]()
        if taken > 0:  # a difference of two times need not be
            seconds[name].append(taken)

    for name in rivals:
        attempt(name, partial(start, name))
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and not budget.left():
            break
        for name in list(calls):
            attempt(name, partial(clock, name))
    return {name: times for name, times in seconds.items() if times}, failures


def shares(size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, bandwidths, and those beside a copy's."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # Every rival reads and writes all bytes, the copy too, but what only checks.
    moved = {name: 1 if name.startswith("all_finite") else 2 for name in medians}
    copy = medians.get("copy")
    return {
        "seconds": medians,
        "gigabytes_per_second": {
            name: moved[name] * size / time / 1e9 for name, time in medians.items()
        },
        "of_copy_bandwidth": {
            name: moved[name] / 2 * copy / time for name, time in medians.items()
        }
        if copy
        else {},
    }


def save(figures: dict[str, Any], trees: Cases, card: str) -> None:
    """Writes this card's figures, and what is the fastest, beside those of others."""
    rows = [row for row in figures["cases"] if row["case"] in trees]
    best = [
        (row["bytes"], best_check(row["seconds"], figures["checks"])) for row in rows
    ]
    # Of some trees alone it would be taken for the others.
    known = len(rows) == len(trees) and all(name for _, name in best)
    before = json.loads(MEASURED.read_text(encoding="utf-8"))
    here = {
        "environment": environment(),
        "fastest": sorted(best) if known else [],
        "figures": figures,
    }
    content = {key: {**(before[key] or {}), card: here[key]} for key in here}
    write_json(MEASURED, content)


def best_check(seconds: dict[str, float], checks: Any) -> str | None:
    """The implementation that checked the fastest; None without XLA's time.

    A kernel that differs from the reference anywhere is never chosen, nor one of which
    it is not known.
    """
    its = {
        name: seconds[f"all_finite ({name})"]
        for name in backends.IMPLEMENTATIONS
        if f"all_finite ({name})" in seconds
        and (name == "xla" or unscale_check.passed(checks.get(name, {})))
    }
    if "xla" not in its:
        return None
    best = min(its, key=its.__getitem__)
    return best if its["xla"] > MARGIN * its[best] else "xla"


def show(rows: list[dict[str, Any]]) -> None:
    rivals = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    table = Table("case", "leaves", *rivals, title="share of the bandwidth of a copy")
    for row in rows:
        of_copy = [row["of_copy_bandwidth"].get(name) for name in rivals]
        cells = ["-" if share is None else f"{share:.2f}" for share in of_copy]
        table.add_row(row["case"], str(row["leaves"]), *cells)
    Console().print(table)
    print(f"written: {MEASURED}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the share of the copy bandwidth for every case, of what was timed."""
    rivals = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    hidden = ("all_finite", "copy")
    rivals = [name for name in rivals if not name.startswith(hidden)]
    if not rivals:
        return
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    places = np.arange(len(rows))
    width = 0.8 / len(rivals)
    for k, name in enumerate(rivals):
        of_copy = [row["of_copy_bandwidth"].get(name, 0) for row in rows]
        axes.bar(
            places + (k - len(rivals) / 2 + 0.5) * width, of_copy, width, label=name
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
