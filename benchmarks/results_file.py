"""Writes a benchmark's figures, with what they depend on, to benchmarks/results/."""

import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import jamp
from jamp._lowerings.processor import Processor, this_processor

CODE = Path(__file__).parent
RESULTS = CODE / "results"
CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "jmp", "jaxamp")


def results_path(name: str) -> Path:
    """`results/NAME-DEVICE-jaxVERSION.json`."""
    release = ".".join(jax.__version__.split(".")[:2])
    return RESULTS / f"{name}-{device_name()}-jax{release}.json"


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Writes the file of that path, with what the figures depend on."""
    path = results_path(name)
    path.parent.mkdir(exist_ok=True)
    return write_json(path, {"environment": environment(), "figures": figures})


def device_name() -> str:
    """The accelerator, or "cpu" and the processor's bfloat16 instructions."""
    if jax.default_backend() != "cpu":
        return card_name(jax.devices()[0])
    found = this_processor()
    held_back = ["held_back"] if found.is_held_back else []
    instructions = sorted(found.instructions, reverse=True)
    return "-".join(["cpu", *instructions, *held_back])


def card_name(device: jax.Device) -> str:
    """The kind of a device, as a part of a file's name."""
    return re.sub(r"\W+", "-", device.device_kind).lower()


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Writes a file to read and to compare, and returns its path."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def first_line(error: BaseException) -> str:
    """An error as a figure: its kind and the first line of what it says."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"[:300]


def environment() -> dict[str, Any]:
    """What figures depend on: the device, the processor and the versions."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "processor": processor(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {
            "jamp-jax": jamp.__version__,
            **{package: installed_version(package) for package in PACKAGES},
        },
    }


def commit() -> str | None:
    """The commit of the code, with a mark if files differ; None outside a clone.

    What benchmarks have written is no code.
    """
    root, status = CODE.parent, ["git", "status", "--porcelain", "--untracked-files=no"]
    commands = (
        ["git", "describe", "--always"],
        [*status, "--", ".", f":!{CODE.name}/results"],
    )
    try:
        found, changed = (
            subprocess.run(
                command, cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}-dirty" if changed else found


def installed_version(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> dict[str, Any]:
    """The processor's name, and of its bfloat16 instructions, or None if unknown."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    found = Processor.described(text)
    answers = {
        "avx512_bf16": "avx512_bf16" in found.instructions,
        "amx_bf16": found.has_amx,
        "held_back": found.is_held_back,
    }
    if found.features is None:
        answers = dict.fromkeys(answers)
    return {"name": name[1] if name else None, **answers}
