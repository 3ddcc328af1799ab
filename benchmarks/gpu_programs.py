"""What autocast's training steps become on an H200: memory, converts, kernels.

Compiles every subject of the step benchmark for a GPU that need not be there, see
deviceless.py; nothing is timed. Parallel to `steps.py --figures-only`, which compiles
for the device at hand.
"""

import argparse
from typing import Any

# First, since it sets what JAX reads when it is imported.
from deviceless import bytes_moved, compile_for_h200, kernels  # isort: skip
import jax
import jax.numpy as jnp
import program_figures
from results_file import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import FlaxRival
from subjects import SUBJECTS, make_subject

import jamp

RIVALS = {
    "float32": FlaxRival(),
    "by hand bfloat16": FlaxRival(dtype=jnp.bfloat16),
    "autocast bfloat16": FlaxRival(
        transform=jamp.autocast(device_type="gpu", dtype=jnp.bfloat16)
    ),
    "autocast float16": FlaxRival(transform=jamp.autocast(device_type="gpu")),
}
RATIOS = ("temporary_bytes", "residual_bytes", "bytes_moved")


def figures(subject: str, size: str, rival: FlaxRival) -> dict[str, Any]:
    """The figures of a training step, compiled for an H200."""
    program = FlaxProgram(make_subject(subject, size), rival, "training")
    compiled = compile_for_h200(*program.step_and_arguments(), donate=(0,))
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "residual_bytes": program.figures["residual_bytes"]["total"],
        "casts_in_hlo": program_figures.casts_in_hlo(compiled.as_text()),
        "kernels": kernels(compiled),
        "bytes_moved": bytes_moved(compiled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", choices=SUBJECTS, nargs="+", default=[*SUBJECTS])
    parser.add_argument("--size", default="gpu")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for subject in arguments.subject:
        rows[subject] = {}
        for name, rival in track(RIVALS.items(), subject):
            try:
                found = figures(subject, arguments.size, rival)
            except Exception as error:  # noqa: BLE001 - one failure is a result
                found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            rows[subject][name] = found
            jax.clear_caches()
    table = Table(
        "subject", "program", "memory", "residuals", "moved", "casts", "kernels"
    )
    for subject, programs in rows.items():
        plain = programs["float32"]
        for name, found in programs.items():
            if "error" in found or "error" in plain:
                table.add_row(
                    subject, name, str(found.get("error", "")), "", "", "", ""
                )
                continue
            ratios = [
                f"{found[key] / plain[key]:.2f}" if plain[key] else "-"
                for key in RATIOS
            ]
            table.add_row(
                subject,
                name,
                *ratios,
                str(found["casts_in_hlo"]),
                str(found["kernels"]),
            )
    Console().print(table)
    print(f"written: {write_results('gpu_programs', {'subjects': rows})}")


if __name__ == "__main__":
    main()
