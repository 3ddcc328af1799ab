"""Writes a benchmark's figures, with what they depend on, to benchmarks/results/."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Writes `results/NAME-DEVICE-jaxVERSION.json` and returns its path."""
    device = jax.devices()[0]
    environment = {
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {
            package: version(package)
            for package in ("jax", "jaxlib", "flax", "optax", "jamp-jax")
        },
    }
    release = ".".join(jax.__version__.split(".")[:2])
    path = RESULTS / f"{name}-{device.platform}-jax{release}.json"
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"environment": environment, "figures": figures}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path
