"""Walks through a program in two runs at once, and measures every equation of it.

What a jit, a checkpoint or a function with derivative rules holds is walked through
where it stands, equation by equation; of a branch, the one that the run under autocast
takes. A loop is compiled as a whole, and calls back in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jamp import _dtypes, _origin
from jamp._diagnosis import loops
from jamp._diagnosis.measure import (
    Pair,
    State,
    Statistics,
    is_measured,
    measure,
    state_of,
)
from jamp._diagnosis.shadow import EXACTLY, as_pair, run_pair
from jamp._plan import primitives
from jamp._regions import Scope
from jamp._rules.programs import closed

Steps = dict[Hashable, Callable[..., list[Pair]]]


@dataclass(frozen=True, eq=False)
class Site:
    """One result of an equation of the program.

    Attributes:
      number: counts the sites in the program's order.
      eqn: the equation.
      dtype: the dtype of the result.
      scope: the named scopes around it, outermost first.
      callers: the equations whose programs it stands in, outermost first.
      scaled: whether the result carries the loss scale: it is part of a gradient.
    """

    number: int
    eqn: JaxprEqn
    dtype: Any
    scope: tuple[str, ...]
    callers: tuple[JaxprEqn, ...]
    scaled: bool

    @property
    def sources(self) -> tuple[JaxprEqn, ...]:
        """The equation and its callers, innermost first."""
        return (self.eqn, *reversed(self.callers))

    @property
    def location(self) -> _origin.Location | None:
        """The user's line that led to the equation."""
        found = map(_origin.location, self.sources)
        return next((place for place in found if place is not None), None)


class Measured(NamedTuple):
    """A site and its statistics."""

    site: Site
    statistics: Statistics


class Ledger:
    """What was measured, site by site, and what was computed from what."""

    def __init__(self) -> None:
        self._found: dict[int, Measured] = {}
        self._origins: list[frozenset[int]] = []

    def number(self, origins: Iterable[int]) -> int:
        """A number for a further site, whose operands came from others."""
        self._origins.append(frozenset(origins))
        return len(self._origins) - 1

    @property
    def size(self) -> int:
        """How many sites there are."""
        return len(self._origins)

    def origins(self, number: int) -> frozenset[int]:
        """The sites that the operands of a site came from."""
        return self._origins[number]

    def get(self, number: int) -> Measured | None:
        """What was measured at a site; None if it has not run."""
        return self._found.get(number)

    def led_to(self, origins: Iterable[int]) -> dict[int, None]:
        """The sites that values from these sites were computed from, nearest first.

        These sites themselves are among them.
        """
        found = dict.fromkeys(origins)
        nearest = list(found)
        while nearest:
            further = (self._origins[number] for number in nearest)
            nearest = [
                number
                for number in dict.fromkeys(chain.from_iterable(map(sorted, further)))
                if number not in found
            ]
            found.update(dict.fromkeys(nearest))
        return found

    def entering(self, pair: Pair) -> State:
        """The state of a value that enters a program."""
        return state_of(pair)

    def note(
        self, site: Site, pair: Pair, operands: Sequence[State], iteration: int | None
    ) -> State:
        """Measures a result; returns its state."""
        statistics, state = measure(pair, operands, iteration)
        known = self._found.get(site.number)
        if known is not None:
            statistics = known.statistics.merge(statistics)
        self._found[site.number] = Measured(site, statistics)
        return state

    @property
    def measured(self) -> list[Measured]:
        """What was measured, in the program's order."""
        return [self._found[number] for number in sorted(self._found)]


class Value(NamedTuple):
    """A value of the walk.

    Attributes:
      pair: what it is in both runs.
      state: how far it is from float32's, or, inside a loop, where that will be found;
        None for what is not measured.
      scaled: whether it depends on the loss scale.
      origins: the sites that it came from.
    """

    pair: Pair
    state: Any
    scaled: bool
    origins: frozenset[int]


@dataclass(frozen=True)
class Place:
    """Where in the program the walk is."""

    scope: Scope = field(default_factory=Scope)
    callers: tuple[JaxprEqn, ...] = ()

    def enter(self, eqn: JaxprEqn) -> Place:
        """The place of the program that an equation holds."""
        scope = self.scope.enter(eqn.source_info.name_stack)
        return Place(scope, (*self.callers, eqn))


class Walk:
    """One walk through a program.

    Attributes:
      ledger: where what is measured is noted.
      observer: what measures: the ledger, or what stands for it inside a loop.
      iteration: that of the loop around the program, if there is one.
      eager: whether values are arrays; inside a loop they are traced.
    """

    def __init__(
        self,
        steps: Steps,
        advance: Callable[[], object],
        ledger: Ledger | None = None,
        observer: Any = None,
        iteration: Any = None,
    ) -> None:
        """Begins a walk.

        Args:
          steps: compiled equations, which several walks may share.
          advance: called after each equation.
          ledger: that of the walk around this one.
          observer: what measures inside a loop.
          iteration: that of the loop.
        """
        self.ledger = ledger or Ledger()
        self.observer = observer or self.ledger
        self.iteration = iteration
        self.eager = observer is None
        self._steps = steps
        self._advance = advance

    def inside(self, observer: Any, iteration: Any) -> Walk:
        """A walk through a program inside a loop."""
        return Walk(self._steps, lambda: None, self.ledger, observer, iteration)

    def entering(
        self, pair: Pair, scaled: bool = False, origins: frozenset[int] = frozenset()
    ) -> Value:
        """A value that enters a program."""
        measured = is_measured(jax.typeof(pair.computed))
        state = self.observer.entering(pair) if measured else None
        return Value(pair, state, scaled, origins)

    def run(
        self, program: Any, values: Sequence[Value], place: Place | None = None
    ) -> list[Value]:
        """Runs a program on values, and measures its equations."""
        place, program = place or Place(), closed(program)
        jaxpr = program.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, program.consts, strict=True):
            env[var] = self.entering(as_pair(const))

        def read(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return env[atom]
            literal = np.asarray(atom.val, _dtypes.dtype_of(atom))
            return self.entering(as_pair(literal))

        unused = _unused_after(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, list(map(read, eqn.invars)), place)
            env.update(zip(eqn.outvars, results, strict=True))
            for var in unused[index]:
                env.pop(var, None)
        return list(map(read, jaxpr.outvars))

    def _equation(
        self, eqn: JaxprEqn, operands: Sequence[Value], place: Place
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in primitives.CALLS:
            program = eqn.params[primitives.CALLS[name]]
            return self.run(program, operands, place.enter(eqn))
        if name in loops.RUNS:
            results = loops.RUNS[name](self, eqn, operands, place.enter(eqn))
        else:
            results = self._plain(eqn, operands, place)
        self._advance()
        return results

    def _plain(
        self, eqn: JaxprEqn, operands: Sequence[Value], place: Place
    ) -> list[Value]:
        pairs = self._bind(eqn, [operand.pair for operand in operands])
        scaled = any(operand.scaled for operand in operands)
        states = [operand.state for operand in operands if operand.state is not None]
        names = place.scope.enter(eqn.source_info.name_stack).names
        scope = tuple(name for name in names if not _is_of_jax(name))
        origins = frozenset().union(*(operand.origins for operand in operands))
        values = []
        for var, pair in zip(eqn.outvars, pairs, strict=True):
            state, came_from = None, origins
            if is_measured(var.aval):
                number, dtype = self.ledger.number(origins), _dtypes.dtype_of(var)
                site = Site(number, eqn, dtype, scope, place.callers, scaled)
                state = self.observer.note(site, pair, states, self.iteration)
                came_from = frozenset({number})
            values.append(Value(pair, state, scaled, came_from))
        return values

    def _bind(self, eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
        if not self.eager:
            return run_pair(eqn, operands)
        dtypes = tuple(map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars)))
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), eqn.ctx, dtypes)
        try:
            known = key in self._steps
        except TypeError:
            key, known = eqn, False
        if not known:
            self._steps[key] = jax.jit(
                lambda *operands: run_pair(eqn, operands), compiler_options=EXACTLY
            )
        return self._steps[key](*operands)


def _is_of_jax(name: str) -> bool:
    """Whether JAX itself opened a scope: for a checkpoint, or an einsum."""
    return name in ("checkpoint", "rematted_computation") or "->" in name


def _unused_after(jaxpr: Any) -> list[list[Any]]:
    """For each equation, the variables that nothing reads from then on."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys(eqn.outvars, index))
        atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        last.update(dict.fromkeys(atoms, index))
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    unused: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for var, index in last.items():
        unused[index].append(var)
    return unused


def count_equations(program: Any) -> int:
    """How many equations a walk goes through, a loop counted as one."""
    total = 0
    for eqn in closed(program).jaxpr.eqns:
        param = primitives.CALLS.get(eqn.primitive.name)
        total += 1 if param is None else count_equations(eqn.params[param])
    return total
