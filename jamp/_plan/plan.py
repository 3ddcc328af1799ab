"""A plan: what is to run for one program, step by step, in dtypes that are decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn

from jamp._dtypes import DType
from jamp._plan.context import Context
from jamp._plan.records import Entry
from jamp._plan.values import Traits, Value


@dataclass(frozen=True, eq=False)
class Action:
    """Something to bind.

    Attributes:
      operands: the values that it takes.
      results: the values that it makes.
    """

    operands: Sequence[Value]
    results: Sequence[Value]


@dataclass(frozen=True, eq=False)
class Cast(Action):
    """A conversion to the dtype of its result."""


@dataclass(frozen=True, eq=False)
class Broadcast(Action):
    """A broadcast to the shape of its result, in the dtype of its operand."""


@dataclass(frozen=True, eq=False)
class Bind(Action):
    """An equation without inner programs.

    Attributes:
      eqn: the equation as traced.
      dtypes: those of its operands, if they are others than traced.
      device_type: what the program is for.
    """

    eqn: JaxprEqn
    dtypes: tuple[Any, ...] | None
    device_type: str


@dataclass(frozen=True, eq=False)
class Float32Call(Action):
    """Equations that run in the float32 that they were traced in, as one function.

    Attributes:
      eqns: the equations, all in the same named scopes.
      invars: the variables that they read and do not make.
      outvars: those of their results that are wanted.
      narrowed: for each of `outvars` the value in a 16-bit dtype that is wanted too, if
        any; these follow the others among the results.
      device_type: what the program is for.
    """

    eqns: Sequence[JaxprEqn]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    narrowed: Sequence[Value | None]
    device_type: str


@dataclass(frozen=True, eq=False)
class Structural(Action):
    """An equation that holds programs.

    Attributes:
      eqn: the equation as traced.
      plans: what is to run for its programs.
      context: what holds around it.
      kind: the primitive that it is emitted as.
    """

    eqn: JaxprEqn
    plans: Sequence[Plan]
    context: Context
    kind: str

    @property
    def slots(self) -> list[int]:
        """What the last operands are casts of.

        They are positions among the inputs of the last program, which takes the casts
        as further inputs.
        """
        return [slot for slot, _ in self.plans[-1].extras]

    @property
    def dtypes(self) -> list[Any]:
        """Dtypes of its results."""
        return [value.dtype for value in self.results]


@dataclass(frozen=True)
class Step:
    """Actions that have one source.

    Attributes:
      source: the equation that they stem from, and the calls around it that are gone.
      actions: the actions.
    """

    source: tuple[JaxprEqn, ...]
    actions: list[Action] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    """What is to run for one program.

    Attributes:
      inputs: its inputs.
      extras: further inputs: casts of inputs, by position and dtype.
      results: its results.
      steps: what is to be bound, in order.
      entries: the records of what was decided.
      changed: whether anything differs from the program as traced.
    """

    inputs: Sequence[Value]
    extras: dict[tuple[int, DType], Value] = field(default_factory=dict)
    results: Sequence[Value] = ()
    steps: list[Step] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    changed: bool = False
    _source: tuple[JaxprEqn, ...] = ()

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """Dtypes of its results."""
        return tuple([value.dtype for value in self.results])

    @property
    def traits(self) -> tuple[Traits, ...]:
        """What is known of its results."""
        return tuple([value.traits for value in self.results])

    @contextmanager
    def source(self, eqn: JaxprEqn) -> Iterator[None]:
        """Makes an equation the source of the actions that are added inside."""
        outer = self._source
        self._source = (*outer, eqn)
        yield
        self._source = outer

    def add(self, action: Action) -> None:
        """Adds an action."""
        if not self.steps or self.steps[-1].source is not self._source:
            self.steps.append(Step(self._source))
        self.steps[-1].actions.append(action)
