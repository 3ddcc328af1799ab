"""What a walk through a program keeps: its values, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _origin
from jamp._diagnosis.measure import Pair, State, Statistics, measure, state_of
from jamp._regions import Scope


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
