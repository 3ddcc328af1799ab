"""What autocast's training steps become on an H200: memory, converts, kernels.

Compiles every subject of the step benchmark for a GPU that need not be there, see
deviceless.py; nothing is timed. Parallel to `steps.py --figures-only`, which compiles
for the device at hand. With `--devices 8` it compiles data parallel steps, and counts
the bytes of gradients that the devices add up.
"""

import argparse
from dataclasses import replace
from typing import Any

# First, since it sets what JAX reads when it is imported.
from deviceless import (  # isort: skip
    bytes_moved,
    bytes_reduced,
    compile_for_h200,
    kernels,
)
import jax
import jax.numpy as jnp
import program_figures
from results_file import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import FlaxRival
from subjects import OTHERS, add_subjects, make_subject

import jamp

LOW_GRADIENTS = replace(jamp.Policy.load("gpu"), float32_gradients=False)
RIVALS = {
    "float32": FlaxRival(),
    "by hand bfloat16": FlaxRival(dtype=jnp.bfloat16),
    "autocast bfloat16": FlaxRival(
        transform=jamp.autocast(device_type="gpu", dtype=jnp.bfloat16)
    ),
    "autocast bfloat16, gradients too": FlaxRival(
        transform=jamp.autocast(
            device_type="gpu", dtype=jnp.bfloat16, policy=LOW_GRADIENTS
        )
    ),
    "autocast float16": FlaxRival(transform=jamp.autocast(device_type="gpu")),
}
PARALLEL = ("float32", "autocast bfloat16", "autocast bfloat16, gradients too")
RATIOS = ("temporary_bytes", "residual_bytes", "bytes_moved")


def figures(subject: str, size: str, rival: FlaxRival, devices: int) -> dict[str, Any]:
    """The figures of a training step, compiled for one or several H200s."""
    program = FlaxProgram(make_subject(subject, size), rival, "training")
    compiled = compile_for_h200(
        *program.step_and_arguments(), donate=(0,), devices=devices, batch=(1, 2)
    )
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "residual_bytes": program.figures["residual_bytes"]["total"],
        "casts_in_hlo": program_figures.casts_in_hlo(compiled.as_text()),
        "kernels": kernels(compiled),
        "bytes_moved": bytes_moved(compiled),
        "bytes_reduced": bytes_reduced(compiled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_subjects(parser)
    parser.add_argument("--size", default="gpu")
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for subject in arguments.subject:
        rows[subject] = {}
        names = PARALLEL if arguments.devices > 1 else RIVALS
        for name in track(names, subject):
            try:
                found = figures(
                    subject, arguments.size, RIVALS[name], arguments.devices
                )
            except Exception as error:  # noqa: BLE001 - one failure is a result
                found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            rows[subject][name] = found
            jax.clear_caches()
    table = Table(
        *("subject", "program", "memory", "residuals", "moved", "casts", "kernels"),
        "reduced",
    )
    for subject, programs in rows.items():
        plain = programs["float32"]
        for name, found in programs.items():
            if "error" in found or "error" in plain:
                table.add_row(subject, name, str(found.get("error", "")), *[""] * 5)
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
                f"{sum(found['bytes_reduced'].values()) / 2**20:.1f} MiB",
            )
    Console().print(table)
    name = "gpu_programs" if arguments.devices == 1 else "gpu_programs_parallel"
    name += "-others" if arguments.subject == OTHERS else ""
    print(f"written: {write_results(name, {'subjects': rows})}")


if __name__ == "__main__":
    main()
