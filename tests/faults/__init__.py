"""Programs that 16 bits spoil, each at the line that is marked with FAULT."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jamp

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


class Fault(NamedTuple):
    """A program with a fault.

    Attributes:
        fn: The function.
        args: Its arguments.
        kind: The kind of the fault.
        operation: The primitive in which it is seen.
        loss_scale: If the gradient is to be diagnosed too.
        repaired: The function with the line changed as suggested, where the cure is a
            change of the program.
        dtype: The 16-bit dtype that spoils it.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str
    operation: str
    loss_scale: float | None = None
    repaired: Callable[..., Any] | None = None
    dtype: str = "float16"


def load(name: str) -> Fault:
    return importlib.import_module(f"{__name__}.{name}").make()


def diagnosis_of(fault: Fault) -> jamp.Diagnosis:
    """What `jamp.diagnose` says of a fault."""
    diagnose = jamp.diagnose(
        fault.fn,
        device_type="gpu",
        dtype=fault.dtype,
        loss_scale=fault.loss_scale,
        progress=False,
    )
    return diagnose(*fault.args)


def path_of(name: str) -> str:
    return str(HERE / f"{name}.py")


def marked_line(name: str) -> int:
    lines = Path(path_of(name)).read_text("utf-8").splitlines()
    (found,) = (n for n, line in enumerate(lines, 1) if line.endswith("# FAULT"))
    return found


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    """Normally distributed numbers, float32."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype(np.float32)
