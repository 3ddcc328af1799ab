"""What holds around equations that are planned, and the values of their program."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp._plan.records import Ruling
from jamp._plan.values import Value
from jamp._policy.functions import Function
from jamp._tracing.regions import Options, Scope


class Context(NamedTuple):
    """What holds around the equations being planned.

    Attributes:
      scope: named scopes and the region.
      forced: the ruling of the listed function they stand in, if it settles them.
      inside: listed functions whose own entries no longer count.
      linear: whether it is the program of a derivative, which JAX may transpose.
      tried: whether it is a derivative rule that is only asked whether it would change.
    """

    scope: Scope
    forced: Ruling | None = None
    inside: frozenset[Function] = frozenset()
    linear: bool = False
    tried: bool = False

    @property
    def region(self) -> Options:
        """The options in force."""
        return self.scope.options


class Environment:
    """Values of a program's variables."""

    def __init__(self, jaxpr: Any) -> None:
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
        """The value of a variable or literal."""
        if isinstance(var, Literal):
            return Value.literal(var)
        return self._overlay.get(var) or self._values[var]

    def overlay(self, values: Mapping[Var, Value]) -> Environment:
        """A view in which some variables read otherwise; it binds into this one."""
        view = copy.copy(self)
        view._overlay = {**self._overlay, **values}
        return view

    def bind(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Gives values to variables."""
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
