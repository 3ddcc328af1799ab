"""The examples as scripts, as short as their tests have them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from card_checks import ROOT, Figures

# {} is a folder of the script's own.
ARGUMENTS = {
    "char_transformer": "--steps 30 --depth 1 --letters 20 --figure {}/runs.png",
    "digits": "--quick --figure {}/losses.png",
    "gan": "--epochs 20 --figure {}/drawn.png",
    "inference": "--epochs 2 --folder {}",
    "lstm": "--steps 200",
    "resnet": "--epochs 6",
}
# It starts processes of its own, with a device each.
LEFT_OUT = ("multi_process",)
TINY = ("clipping", "gradient_penalty")
THREADS = min(8, os.cpu_count() or 1)
LINES = 5


def part(size: str) -> Iterator[Figures]:
    """The exit status and the last lines of each."""
    paths = [
        path
        for path in sorted((ROOT / "examples").glob("*.py"))
        if "__main__" in path.read_text("utf-8")
        if path.stem in TINY or (size == "full" and path.stem not in LEFT_OUT)
    ]
    found: dict[str, Figures] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {pool.submit(run, path): path.stem for path in paths}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            failed = [name for name, f in found.items() if f["exit"]]
            said = f"{len(found) - len(failed)} of {len(paths)} ran"
            failures = f"; failed: {', '.join(failed)}" if failed else ""
            yield {"summary": said + failures, "scripts": found}


def run(path: Path) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ARGUMENTS.get(path.stem, "").format(folder).split()
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return {"exit": done.returncode, "output": done.stdout.splitlines()[-LINES:]}
