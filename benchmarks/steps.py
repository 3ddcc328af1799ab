"""What autocast costs and gains in a training step and in inference.

Measured beside it is what one would use instead: float32, mixed precision written by
hand in Flax, other libraries, and PyTorch with and without its autocast. All run in
turn, in one process, on the same batch.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
from alone import alone
from measuring import BASELINE, Comparison, Plan
from program_figures import lines
from results_file import results_path, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from step_summary import draw, errors, summarise, table
from subjects import OTHERS, SUBJECTS, add_subjects
from timing import LEAST_SECONDS, threads

MODES = ("training", "inference")
ROUNDS = 7
GPU_BUDGET = 420.0
MERGE_SECONDS = 15.0  # of a budget, to end what still runs and to write
# Of one reading of the clock: on a GPU the first step of a reading records its CUDA
# graphs anew, as its buffers are new, which is to weigh little.
GPU_SECONDS = 0.1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add_subjects(parser)
    add("--mode", choices=MODES, nargs="+", default=MODES)
    add("--size", choices=("tiny", "cpu", "gpu"), help="default: that of the device")
    add("--rounds", type=int, default=ROUNDS, help="how often each rival is timed")
    add("--rivals", nargs="+", default=(), help="how the wanted names begin")
    add("--budget", type=float, help="seconds for everything; default on GPUs: 420")
    add("--figures-only", action="store_true", help="what needs no timing")
    add("--residuals", action="store_true", help="list what autocast saves")
    add("--waiting", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.size is None:
        chosen.size = default_size()
    if chosen.budget is None:
        chosen.budget = GPU_BUDGET if on_gpu() else math.inf
    return chosen


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def default_size() -> str:
    return "gpu" if on_gpu() else "cpu"


def file_name(chosen: argparse.Namespace) -> str:
    """A part of the figures goes to a file of its own."""
    parts = ["step_figures" if chosen.figures_only else "steps"]
    sets = {SUBJECTS: (), OTHERS: ("others",)}
    parts += sets.get(tuple(chosen.subject), chosen.subject)
    if tuple(chosen.mode) != MODES:
        parts += chosen.mode
    if chosen.rivals:
        parts += (rival.replace(" ", "_") for rival in chosen.rivals)
    if chosen.size != default_size():
        parts.append(chosen.size)
    return "-".join(parts)


def residual_table(program: Any) -> Table:
    """What a program keeps for its backward pass, the biggest first."""
    made = Table("MiB", "shape", "dtype", "operation", "line")
    for saved in program.residuals:
        made.add_row(
            f"{saved.nbytes / 2**20:.2f}",
            str(list(saved.shape)),
            str(saved.dtype),
            saved.eqn.primitive.name,
            " in ".join(lines(saved.eqn)),
        )
    return made


def run(chosen: argparse.Namespace, console: Console) -> None:
    """Measures what was chosen, and writes it as it comes."""
    plan = Plan(
        rivals=tuple(chosen.rivals),
        rounds=0 if chosen.figures_only else chosen.rounds,
        jobs=max(1, threads() // 2) if on_gpu() else 1,
        least_seconds=GPU_SECONDS if on_gpu() else LEAST_SECONDS,
    )
    end = time.monotonic() + chosen.budget
    comparisons = [
        Comparison(subject, chosen.size, mode, plan, end)
        for subject in chosen.subject
        for mode in chosen.mode
    ]
    summaries: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(comparisons))

        def say(comparison: Comparison) -> Callable[[str], None]:
            name = f"{comparison.subject}, {comparison.mode}"
            return lambda doing: progress.update(bar, description=f"{name}: {doing}")

        for comparison in comparisons:
            comparison.prepare(say(comparison))
        with alone(end) if on_gpu() else nullcontext():
            end = own_end(chosen, end)
            while comparisons:
                now = time.monotonic()
                comparisons[0].deadline = now + (end - now) / len(comparisons)
                comparisons[0].measure(say(comparisons[0]))
                comparison = comparisons.pop(0)
                summaries.append(summarise(comparison, absolute=on_gpu()))
                show(comparison, summaries[-1], chosen.residuals, console)
                comparison.close()
                path = write(chosen, summaries)
                progress.advance(bar)
    if plan.rounds:
        draw(summaries, path.with_suffix(".png"))
    console.print(f"written: {path}")


def own_end(chosen: argparse.Namespace, end: float) -> float:
    """When one of several processes has had its share of what is left."""
    if chosen.waiting is None:
        return end
    for subject in chosen.subject:
        (chosen.waiting / subject).unlink()
    now = time.monotonic()
    return now + (end - now) / (1 + len(list(chosen.waiting.iterdir())))


def show(
    comparison: Comparison, summary: dict[str, Any], residuals: bool, console: Console
) -> None:
    console.print(table(summary), errors(summary))
    if residuals and comparison.mode == "training":
        for name, program in comparison.programs.items():
            if name.startswith("autocast"):
                console.print(name, residual_table(program))


def write(chosen: argparse.Namespace, summaries: list[dict[str, Any]]) -> Path:
    rounds = 0 if chosen.figures_only else chosen.rounds
    figures = {"rounds": rounds, "comparisons": summaries}
    return write_results(file_name(chosen), figures)


def run_in_processes(
    chosen: argparse.Namespace, arguments: list[str], console: Console
) -> None:
    """As `run`, with a process for each subject, of which one at a time measures."""
    # Its processes have started later, and are to end before it.
    end, start = time.monotonic() + chosen.budget, time.time()
    waiting = Path(tempfile.mkdtemp())  # a file for each that has not had its turn
    for subject in chosen.subject:
        (waiting / subject).touch()
    budget = str(max(1.0, chosen.budget - MERGE_SECONDS))
    alike = [argument for argument in arguments if argument != "--others"]
    alike += ["--budget", budget, "--waiting", str(waiting)]
    started = {
        subject: subprocess.Popen(
            [sys.executable, __file__, *alike, "--subject", subject]
        )
        for subject in chosen.subject
    }
    summaries: list[dict[str, Any]] = []
    parts = []
    for subject, process in started.items():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        part = argparse.Namespace(**{**vars(chosen), "subject": (subject,)})
        path = results_path(file_name(part))
        found: list[dict[str, Any]] = []
        if path.exists() and path.stat().st_mtime > start:
            parts.append(path)
            with suppress(ValueError):  # it was stopped while it wrote
                found = json.loads(path.read_text("utf-8"))["figures"]["comparisons"]
        measured = {summary["mode"] for summary in found}
        missing = [unmeasured(part, m) for m in chosen.mode if m not in measured]
        summaries += found + missing
        path = write(chosen, summaries)
    if not chosen.figures_only:
        draw(summaries, path.with_suffix(".png"))
    shutil.rmtree(waiting)
    for part in parts:
        part.unlink()
        part.with_suffix(".png").unlink(missing_ok=True)
    console.print(f"written: {path}")


def unmeasured(part: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What is written of a process that did not come to measure in a mode."""
    rivals = {BASELINE: {"error": "BudgetError: no time was left for it"}}
    return {
        "subject": part.subject[0],
        "size": part.size,
        "mode": mode,
        "rivals": rivals,
    }


def main() -> None:
    # PyTorch needs some of the GPU's memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Processes of several subjects share the processor.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    arguments = sys.argv[1:]
    chosen = parse(arguments)
    if on_gpu() and len(chosen.subject) > 1:
        run_in_processes(chosen, arguments, Console())
    else:
        run(chosen, Console())


if __name__ == "__main__":
    main()
