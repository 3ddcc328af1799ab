"""A plan: what is to run for one program, step by step, in dtypes that are decided."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp._dtypes import DType
from jamp._plan.records import Entry, Ruling
from jamp._plan.values import Traits, Value, Values
from jamp._policy.functions import Function
from jamp._tracing.regions import Options, Scope


class Context(NamedTuple):
    """What holds around the equations being planned."""

    scope: Scope  # named scopes and the region
    # The ruling of the listed function they stand in, if it settles them.
    forced: Ruling | None = None
    # Listed functions whose own entries no longer count.
    inside: frozenset[Function] = frozenset()
    # Whether it is the program of a derivative, which JAX may transpose.
    linear: bool = False
    # Whether it is a derivative rule that is only asked whether it would change.
    tried: bool = False

    @property
    def region(self) -> Options:
        return self.scope.options


@dataclass(frozen=True, eq=False)
class Action:
    operands: Values  # the values that it takes
    results: Values  # the values that it makes


@dataclass(frozen=True, eq=False)
class Cast(Action):
    """A conversion to the dtype of its result."""


@dataclass(frozen=True, eq=False)
class Broadcast(Action):
    """A broadcast to the shape of its result, in the dtype of its operand."""


@dataclass(frozen=True, eq=False)
class Bind(Action):
    """An equation without inner programs."""

    eqn: JaxprEqn
    # Those of its operands, if they are others than traced.
    dtypes: tuple[Any, ...] | None
    device_type: str  # what the program is for


@dataclass(frozen=True, eq=False)
class Float32Call(Action):
    """Equations that run in the float32 that they were traced in, as one function."""

    eqns: Sequence[JaxprEqn]  # the equations, all in the same named scopes
    invars: Sequence[Any]  # the variables that they read and do not make
    outvars: Sequence[Any]  # those of their results that are wanted
    # For each of `outvars` the value in a 16-bit dtype that is wanted too, if any;
    # these follow the others among the results.
    narrowed: Sequence[Value | None]
    device_type: str  # what the program is for


@dataclass(frozen=True, eq=False)
class Structural(Action):
    """An equation that holds programs."""

    eqn: JaxprEqn
    plans: Sequence[Plan]  # what is to run for its programs
    context: Context  # what holds around it
    kind: str  # the primitive that it is emitted as

    @property
    def slots(self) -> list[int]:
        """Which inputs of the last program the last operands are casts of."""
        return [slot for slot, _ in self.plans[-1].extras]

    @property
    def dtypes(self) -> list[Any]:
        return [value.dtype for value in self.results]


@dataclass(frozen=True)
class Step:
    """Actions that have one source."""

    # The equation that they stem from, and the calls around it that are gone.
    source: tuple[JaxprEqn, ...]
    actions: list[Action] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    """What is to run for one program."""

    inputs: Values
    # Further inputs: casts of inputs, by position and dtype.
    extras: dict[tuple[int, DType], Value] = field(default_factory=dict)
    results: Values = ()
    steps: list[Step] = field(default_factory=list)  # what is to be bound, in order
    # The records of what was decided.
    entries: list[Entry] = field(default_factory=list)
    changed: bool = False  # whether anything differs from the program as traced
    _source: tuple[JaxprEqn, ...] = ()

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return tuple([value.dtype for value in self.results])

    @property
    def traits(self) -> tuple[Traits, ...]:
        return tuple([value.traits for value in self.results])

    @contextmanager
    def source(self, eqn: JaxprEqn) -> Iterator[None]:
        """Makes an equation the source of the actions that are added inside."""
        outer = self._source
        self._source = (*outer, eqn)
        yield
        self._source = outer

    def add(self, action: Action) -> None:
        if not self.steps or self.steps[-1].source is not self._source:
            self.steps.append(Step(self._source))
        self.steps[-1].actions.append(action)


class Environment:
    """Values of a program's variables, and the plan that it becomes a part of."""

    def __init__(self, jaxpr: Any, plan: Plan) -> None:
        self.plan = plan
        self._values: dict[Var, Value] = {}
        self._overlay: Mapping[Var, Value] = {}
        self._eqns: Sequence[JaxprEqn] = jaxpr.eqns
        self._readers: dict[Var, list[int]] = {}
        read = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
        for index, variables in enumerate(read):
            for var in variables:
                if not isinstance(var, Literal):
                    self._readers.setdefault(var, []).append(index)

    def read(self, var: Any) -> Value:
        if isinstance(var, Literal):
            return Value.literal(var)
        return self._overlay.get(var) or self._values[var]

    def overlay(self, values: Mapping[Var, Value]) -> Environment:
        """A view in which some variables read otherwise; it binds into this one."""
        view = copy.copy(self)
        view._overlay = {**self._overlay, **values}
        return view

    def bind(self, variables: Sequence[Any], values: Values) -> None:
        for var, value in zip(variables, values, strict=True):
            self._values[var] = value

    def used_from(self, var: Any, index: int) -> bool:
        """Whether equation `index` or a later one, or the caller, reads a variable."""
        return self._readers.get(var, [-1])[-1] >= index

    def next_reader(self, var: Any, index: int) -> JaxprEqn | None:
        """The first equation from number `index` on that reads a variable, if any."""
        readers = self._readers.get(var, [])
        place = bisect_left(readers, index)
        found = readers[place] if place < len(readers) else len(self._eqns)
        return self._eqns[found] if found < len(self._eqns) else None
