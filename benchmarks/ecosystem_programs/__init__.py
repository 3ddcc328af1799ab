"""Small programs written with packages of the JAX ecosystem, to run under autocast.

Each is a function that imports its package, builds what it needs in a small random
configuration and returns a `Training` or a `Computation`. Its docstring says what it
is.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

AREAS = ("networks", "solvers", "probability", "agents", "science", "plain")


class Training(NamedTuple):
    """A model to train.

    Attributes:
      loss: a scalar of the parameters and the batch.
      params: a pytree of arrays.
      batch: a pytree of arrays.
      learning_rate: that of Adam.
      steps: how often it is applied.
    """

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    learning_rate: float = 1e-2
    steps: int = 40


class Computation(NamedTuple):
    """A computation without parameters to train.

    Attributes:
      fn: a function of the arguments that returns a pytree of arrays.
      args: its arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Program(NamedTuple):
    """A program and the distribution whose package it uses."""

    distribution: str
    make: Callable[[], Training | Computation]

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.make.__name__


PROGRAMS: list[Program] = []


def program(distribution: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a program that uses a distribution of the package index."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS.append(Program(distribution, make))
        return make

    return register


def load() -> dict[str, Program]:
    """All programs by name."""
    for area in AREAS:
        import_module(f"{__name__}.{area}")
    return {program.name: program for program in PROGRAMS}
