"""Programs that 16 bits spoil, each at the line that is marked with FAULT.

Where what does not fit there is wrong from earlier on, that line is marked with CAUSE.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MARKS = ("# FAULT", "# CAUSE")
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


def path_of(name: str) -> str:
    return str(HERE / f"{name}.py")


def marked_lines(name: str) -> list[int]:
    """The line of a program's fault, and that of what causes it, if it is another."""
    lines = Path(path_of(name)).read_text("utf-8").splitlines()
    found = [
        [number for number, line in enumerate(lines, 1) if line.endswith(mark)]
        for mark in MARKS
    ]
    (fault,), causes = found
    return [fault, *causes]


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    """Normally distributed numbers, float32."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype(np.float32)
