"""What large pages save in a training step on Linux, in float32 and under autocast.

XLA takes the temporary memory of a step anew in each, and Linux maps it page by page
when it is first written. glibc (2.35 and later) asks for large pages if the process is
started with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`. Each subject is trained in
processes with and without it, in turn. Reported are medians of seconds and of the
ratios of pairs.
"""

import json
import os
import statistics
import subprocess
import sys
from operator import truediv
from typing import Any

import jax
from results_file import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import FlaxRival
from steps import default_size
from subjects import SUBJECTS, make_subject
from timing import seconds_of_call

import jamp

PAIRS, STEPS = 4, 7
LARGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
RIVALS = {"float32": FlaxRival(), "autocast": FlaxRival(transform=jamp.autocast)}


def seconds_of_steps(subject: str) -> dict[str, float]:
    """Medians of this process."""
    made = make_subject(subject, default_size())
    batch = jax.device_put((made.inputs, made.targets))
    programs = {n: FlaxProgram(made, rival, "training") for n, rival in RIVALS.items()}
    for program in programs.values():
        program.compile()
        program.start(made.init(), batch)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(STEPS + 1):
        for name, program in programs.items():
            seconds[name].append(seconds_of_call(program.run, (1,)))
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def in_a_process(subject: str, variables: dict[str, str]) -> dict[str, float]:
    """The same of another process, started with more environment variables."""
    done = subprocess.run(
        [sys.executable, __file__, subject],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(subject: str) -> dict[str, Any]:
    """Medians over pairs of processes."""
    small, large = zip(
        *(
            (in_a_process(subject, {}), in_a_process(subject, LARGE))
            for _ in track(range(PAIRS), subject)
        ),
        strict=True,
    )
    figures: dict[str, Any] = {"subject": subject}
    for name in RIVALS:
        before, after = ([found[name] for found in of] for of in (small, large))
        figures[name] = {
            "seconds": statistics.median(before),
            "with_large_pages_seconds": statistics.median(after),
            "ratio": statistics.median(map(truediv, after, before)),
        }
    return figures


def main() -> None:
    figures = [measure(subject) for subject in SUBJECTS]
    table = Table("training", *RIVALS, title="with large pages, of the time without")
    for row in figures:
        table.add_row(row["subject"], *(f"{row[name]['ratio']:.2f}" for name in RIVALS))
    Console().print(table)
    print(f"written: {write_results('large_pages', {'subjects': figures})}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(seconds_of_steps(sys.argv[1])))
    else:
        main()
