"""What autocast adds to compiling the programs that `steps.py` times.

Each subject's training step and inference are compiled in turn as written and under
autocast. Reported are the medians, in seconds, and the median of the ratios of the
pairs.
"""

from typing import Any

import jax
from results_file import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import FlaxRival
from steps import MODES, default_size
from subjects import SUBJECTS, make_subject
from timing import medians_of_pairs

import jamp

PAIRS = 5
# What is compiled with an option, here the default's, is compiled anew each time.
DEFAULT = "CPU_SCHEDULER_TYPE_DEFAULT"
RIVALS = {
    "float32": FlaxRival(scheduler=DEFAULT),
    "autocast": FlaxRival(transform=jamp.autocast, scheduler=DEFAULT),
}


def measure(name: str, mode: str) -> dict[str, Any]:
    """Medians over interleaved pairs, after one pair that is not counted."""
    subject = make_subject(name, default_size())
    programs = {n: FlaxProgram(subject, rival, mode) for n, rival in RIVALS.items()}
    pairs = []
    for _ in track(range(PAIRS + 1), f"{name}, {mode}"):
        for program in programs.values():
            jax.clear_caches()
            program.compile()
        plain, cast = (p.figures["compile_seconds"] for p in programs.values())
        pairs.append((plain, cast))
    return {"subject": name, "mode": mode, **medians_of_pairs(pairs[1:])}


def main() -> None:
    figures = [measure(subject, mode) for subject in SUBJECTS for mode in MODES]
    table = Table("subject", "mode", "float32", "autocast", "ratio")
    for row in figures:
        table.add_row(
            row["subject"],
            row["mode"],
            f"{row['float32_seconds']:.2f} s",
            f"{row['autocast_seconds']:.2f} s",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)
    print(f"written: {write_results('compile_cost', {'programs': figures})}")


if __name__ == "__main__":
    main()
