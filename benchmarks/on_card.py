"""Everything that needs an NVIDIA GPU, in order of worth, within a given time.

What is timed runs first, one program at a time; what only has to be right follows, side
by side. Each benchmark writes its own results; what it prints goes to a log.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LOGS = Path(__file__).parent / "results" / "logs"
# Of a benchmark's time, before it counts by itself: imports and the card's start.
STARTING_SECONDS = 30
GRACE_SECONDS = 10  # to write what is known, for what runs on
TAIL = 2500  # characters of a log to print

# The tests compare with float32, which cuBLAS, cuDNN and Triton would round to TF32.
WITHOUT_TF32 = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
    "JAX_PLATFORMS": "cuda,cpu",
}


class Part(NamedTuple):
    """A command.

    Attributes:
      arguments: of Python; "{seconds}" stands for the time it has.
      share: of the time that is left when it starts.
      environment: what it needs besides.
    """

    arguments: tuple[str, ...]
    share: float = 1.0
    environment: Mapping[str, str] = MappingProxyType({})


def benchmark(name: str, *options: str, **how: Any) -> Part:
    return Part((f"benchmarks/{name}.py", *options), **how)


WORKERS = str(max(2, (os.cpu_count() or 1) - 2))
BUDGET = ("--budget", "{seconds}")
TESTED = ("dtypes", "loss_scaling", "modules", "transform")
PYTEST = ("-m", "pytest", "-v", "-n", WORKERS, "-p", "no:cacheprovider", "--tb=short")

# Those of one stage run side by side; what is timed waits for its turn by itself.
STAGES: dict[str, dict[str, Part]] = {
    "timed": {
        "steps": benchmark("steps", "--rounds", "5", *BUDGET, share=0.7),
        "unscale": benchmark("unscale", *BUDGET, share=0.7),
    },
    "right": {"training": benchmark("training", *BUDGET)},
    "choices": {"layer_sums": benchmark("layer_sums"), "kernels": benchmark("kernels")},
    "tests": {
        "tests": Part(
            (*PYTEST, "-m", "not slow", *(f"tests/{name}" for name in TESTED)),
            environment=WITHOUT_TF32,
        )
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800, help="for everything")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=[*STAGES])
    parser.add_argument("--logs", type=Path, default=LOGS, help="a folder for them")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    for stage in arguments.stage:
        run(STAGES[stage], end, arguments.logs)


def run(parts: dict[str, Part], end: float, logs: Path) -> None:
    """Runs the parts of a stage side by side, and prints how each ended."""
    start = time.monotonic()
    running = {}
    for name, part in parts.items():
        seconds = max(1.0, (end - start) * part.share)
        running[name] = begin(part, seconds, logs / f"{name}.log"), start + seconds
    while running:
        time.sleep(0.2)
        for name, (process, deadline) in list(running.items()):
            # A benchmark ends by itself when its time is over; this is the last resort.
            if process.poll() is None and time.monotonic() > deadline:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                del running[name]
                print(f"=== {name}: {process.poll()}, {time.monotonic() - start:.0f} s")
                text = (logs / f"{name}.log").read_text("utf-8", errors="replace")
                print(text[-TAIL:], flush=True)


def begin(part: Part, seconds: float, log: Path) -> subprocess.Popen[Any]:
    """Starts a command in a process group of its own."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    its = round(max(1.0, seconds - STARTING_SECONDS))
    return subprocess.Popen(
        [sys.executable, *(a.format(seconds=its) for a in part.arguments)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **part.environment,
        },
        stdout=log.open("w", encoding="utf-8"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


if __name__ == "__main__":
    main()
