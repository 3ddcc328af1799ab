"""What autocast costs and gains in a training step and in inference.

Measured beside it is what one would use instead: float32, mixed precision written by
hand in Flax, other libraries, and PyTorch with and without its autocast. All run in
turn, in one process, on the same batch.
"""

import argparse
import math
import os
import time
from typing import Any

import jax
from measuring import Comparison, Plan, threads
from program_figures import lines
from results_file import write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from step_summary import draw, errors, summarise, table
from subjects import SUBJECTS

MODES = ("training", "inference")
ROUNDS = 7
GPU_BUDGET = 420.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--subject", choices=SUBJECTS, nargs="+", default=SUBJECTS)
    add("--mode", choices=MODES, nargs="+", default=MODES)
    add("--size", choices=("tiny", "cpu", "gpu"), help="default: that of the device")
    add("--rounds", type=int, default=ROUNDS, help="how often each rival is timed")
    add("--rivals", nargs="+", default=(), help="how the wanted names begin")
    add("--budget", type=float, help="seconds for everything; default on GPUs: 420")
    add("--figures-only", action="store_true", help="what needs no timing")
    add("--residuals", action="store_true", help="list what autocast saves")
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
    if tuple(chosen.subject) != SUBJECTS:
        parts += chosen.subject
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
    )
    end = time.monotonic() + chosen.budget
    pairs = [(subject, mode) for subject in chosen.subject for mode in chosen.mode]
    summaries: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(pairs))
        for done, (subject, mode) in enumerate(pairs):
            now = time.monotonic()
            deadline = now + (end - now) / (len(pairs) - done)
            comparison = Comparison(subject, chosen.size, mode, plan, deadline)
            comparison.measure(
                lambda doing, where=f"{subject}, {mode}": progress.update(
                    bar, description=f"{where}: {doing}"
                )
            )
            summaries.append(summarise(comparison, absolute=on_gpu()))
            console.print(table(summaries[-1]), errors(summaries[-1]))
            if chosen.residuals and mode == "training":
                for name, program in comparison.programs.items():
                    if name.startswith("autocast"):
                        console.print(name, residual_table(program))
            comparison.close()
            path = write_results(
                file_name(chosen), {"rounds": plan.rounds, "comparisons": summaries}
            )
            progress.advance(bar)
    if plan.rounds:
        draw(summaries, path.with_suffix(".png"))
    console.print(f"written: {path}")


def main() -> None:
    # PyTorch needs some of the GPU's memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run(parse(None), Console())


if __name__ == "__main__":
    main()
