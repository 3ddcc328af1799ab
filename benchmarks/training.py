"""Trains the examples in three dtypes, and checks jamp's numbers, on the GPU there is.

Each part runs in a process of its own, all of them side by side: what they report does
not depend on how busy the card is. `card_checks` has the parts. Without a GPU the parts
run on the CPU, where those that need cuDNN have its error as their figure.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import card_checks
import scale_curves
from results_file import first_line, results_path, write_results
from rich.console import Console
from rich.table import Table

FIGURES = "figures: "
BUDGET = 300  # seconds
LINES = 20  # of the output of what failed


class Process:
    """A part that runs, and what it has said so far."""

    def __init__(self, name: str, size: str, folder: Path):
        self.start = time.monotonic()
        self.seconds: float | None = None
        self._output = folder / f"{name}.out"
        command = [sys.executable, __file__, "--part", name, "--size", size]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(folder),
                start_new_session=True,
            )

    def ended(self, deadline: float) -> bool:
        """Whether the part is done; past the deadline it is stopped."""
        late = time.monotonic() > deadline
        if self._process.poll() is None and not late:
            return False
        self.stop()
        self.seconds = time.monotonic() - self.start
        return True

    def stop(self) -> None:
        """Ends the part if it still runs, with the processes that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def figures(self) -> dict[str, Any]:
        """What the part has measured, and how it failed if it did."""
        text = self._output.read_text("utf-8", "replace")
        # What was stopped may have been about to write a line.
        lines = text[: text.rfind("\n") + 1].splitlines()
        told = [line for line in lines if line.startswith(FIGURES)]
        found = json.loads(told[-1].removeprefix(FIGURES)) if told else {}
        status = self._process.returncode
        if status == -signal.SIGKILL:
            found["error"] = f"stopped after {self.seconds:.0f} s"
        elif status:
            others = [line for line in lines if line not in told]
            found |= {"error": f"exit {status}", "output": others[-LINES:]}
        return {**found, "seconds": round(self.seconds or 0, 1)}


def environment(folder: Path) -> dict[str, str]:
    """The variables of a part: the card's memory and what is compiled are shared."""
    given = dict(os.environ)
    if "cpu" not in given.get("JAX_PLATFORMS", "cpu"):
        given["JAX_PLATFORMS"] += ",cpu"  # for what is computed in float64
    return {
        **given,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PYTHONWARNINGS": "ignore",
    }


def run_part(name: str, size: str) -> None:
    """Prints the figures of a part, as they come, and its error."""
    figures: dict[str, Any] = {}
    try:
        for figures in card_checks.load()[name](size):
            print(FIGURES + json.dumps(figures), flush=True)
    except Exception as error:  # noqa: BLE001 - the error is the figure
        lines = traceback.format_exc().splitlines()[-LINES:]
        figures |= {"error": first_line(error), "output": lines}
        print(FIGURES + json.dumps(figures), flush=True)


def run_all(names: list[str], size: str, budget: float) -> dict[str, Any]:
    """Runs parts side by side and writes their figures as they come.

    Those of the other parts in the file stay.
    """
    deadline = time.monotonic() + budget
    found: dict[str, Any] = {}
    file = "training" if size == "full" else f"training-{size}"
    with tempfile.TemporaryDirectory() as folder:
        running = {name: Process(name, size, Path(folder)) for name in names}
        try:
            # Asks for the device, which takes seconds: the parts run by now.
            path = results_path(file)
            exists = path.exists()
            known = json.loads(path.read_text("utf-8"))["figures"] if exists else {}
            while running:
                for name, process in list(running.items()):
                    if process.ended(deadline):
                        found[name] = process.figures()
                        del running[name]
                        write_results(file, known | found)
                time.sleep(0.2)
        finally:
            for process in running.values():
                process.stop()
    scale_curves.draw(known | found, path.with_name(f"{path.stem}-scales.png"))
    print(f"written: {path}")
    return found


def table(found: dict[str, Any]) -> Table:
    made = Table("part", "seconds", "result")
    for name, figures in sorted(found.items()):
        said = [figures.get(key) for key in ("error", "summary")]
        made.add_row(name, f"{figures['seconds']:.0f}", "; ".join(filter(None, said)))
    return made


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parts = list(card_checks.load())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS")
    parser.add_argument("--part", choices=parts, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part:
        run_part(chosen.part, chosen.size)
        return {}
    # The parts need the card's memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = run_all(chosen.only, chosen.size, chosen.budget)
    Console().print(table(found))
    return found


if __name__ == "__main__":
    main()
