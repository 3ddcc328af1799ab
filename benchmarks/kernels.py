"""Which kernels a step's time goes to, on the GPU that is there.

Profiles subjects of the step benchmark under several rivals, and adds up the time of
each operation of the optimized program, by kind and one by one.
"""

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from alone import alone, gpu
from measuring import initial_variables
from results_file import write_results
from rich.console import Console
from rich.table import Table
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import flax_rivals
from subjects import SUBJECTS, make_subject
from timing import threads

# The kernels of a CUDA graph have no names of operations.
FLAGS = "--xla_gpu_enable_command_buffer="
RIVALS = ("autocast bfloat16", "by hand bfloat16")
STEPS = 3
MOST = 60  # operations of each that are listed
# By what the name of an operation begins with, the first that fits.
KINDS = {
    "matmul": r"gemm|cublas|triton_gemm|__cublas|custom-call|gemm_fusion|nest",
    "conv": r"cudnn|conv\b|conv[_.]",
    "convert": r"(wrapped_)?convert",
    "copy": r"copy|Memcpy|Memset|transpose|wrapped_transpose",
    "reduce": r".*reduce",
    "fusion": r".*fusion",
}


def profiled(program: FlaxProgram, variables: Any) -> dict[str, Any]:
    """Milliseconds on the device in a step, by kind and operation."""
    batch = program.subject.inputs, program.subject.targets
    program.start(*jax.device_put((variables, batch)))
    program.run(2)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program.run(STEPS)
        (path,) = Path(folder).rglob("*.xplane.pb")
        seconds, calls = of_operations(path)
    kinds: Counter[str] = Counter()
    for name, taken in seconds.items():
        kinds[kind(name)] += taken
    return {
        "milliseconds": sum(seconds.values()),
        "kinds": dict(kinds.most_common()),
        "operations": [
            {"name": name, "milliseconds": taken, "calls": calls[name] / STEPS}
            for name, taken in seconds.most_common(MOST)
        ],
    }


def of_operations(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Milliseconds and calls of a step, by operation, from a profile."""
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = str(dict(event.stats).get("hlo_op", event.name))
                seconds[name] += event.duration_ns / 1e6 / STEPS
                calls[name] += 1
    return seconds, calls


def kind(name: str) -> str:
    return next((k for k, begins in KINDS.items() if re.match(begins, name)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--subject", choices=SUBJECTS, nargs="+", default=SUBJECTS)
    parser.add_argument("--rivals", nargs="+", default=RIVALS)
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument("--size", default="gpu")
    parser.add_argument("--text", type=Path, help="a folder for the optimized programs")
    parser.add_argument("--budget", type=float, default=600, help="seconds to wait")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpu()
    rivals = flax_rivals("gpu")
    results = "kernels" if arguments.mode == "training" else "kernels-inference"
    programs = {
        (subject, rival): FlaxProgram(
            make_subject(subject, arguments.size), rivals[rival], arguments.mode
        )
        for subject in arguments.subject
        for rival in arguments.rivals
    }
    rows: dict[str, Any] = {}
    with alone(time.monotonic() + arguments.budget):
        with ThreadPoolExecutor(max(1, threads() // 2)) as pool:
            list(pool.map(FlaxProgram.compile, programs.values()))
        for (subject, rival), program in programs.items():
            variables = initial_variables(subject, arguments.size)
            rows.setdefault(subject, {})[rival] = profiled(program, variables)
            if arguments.text:
                arguments.text.mkdir(exist_ok=True)
                text = f"{subject}-{rival.replace(' ', '_')}.txt"
                (arguments.text / text).write_text(program.text(), "utf-8")
            write_results(results, rows)
    show(rows)


def show(rows: dict[str, Any]) -> None:
    table = Table("subject", "rival", "ms of kernels", "by kind")
    for subject, found in rows.items():
        for rival, figures in found.items():
            kinds = ", ".join(f"{k} {v:.2f}" for k, v in figures["kinds"].items())
            table.add_row(subject, rival, f"{figures['milliseconds']:.2f}", kinds)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
