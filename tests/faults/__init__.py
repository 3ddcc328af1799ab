"""Programs that 16 bits spoil, each at the line that is marked with FAULT."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MARK = "# FAULT"
HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


class Fault(NamedTuple):
    """A program with a fault, under float16.

    Attributes:
        fn: The function.
        args: Its arguments.
        kind: The kind of the fault.
        operation: The primitive in which it is seen.
        loss_scale: If the gradient is to be diagnosed too.
        repaired: The function with the line changed as suggested, where the cure is a
            change of the program.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str
    operation: str
    loss_scale: float | None = None
    repaired: Callable[..., Any] | None = None


def load(name: str) -> Fault:
    return importlib.import_module(f"{__name__}.{name}").make()


def marked_line(name: str) -> tuple[str, int]:
    """The file and line of a program's fault."""
    path = HERE / f"{name}.py"
    (line,) = (
        number
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1)
        if text.endswith(MARK)
    )
    return str(path), line


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    """Normally distributed numbers, float32."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype(np.float32)
