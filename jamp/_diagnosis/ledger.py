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
class Output:
    """One result of an equation of the program.

    Attributes:
      number: counts the outputs in the program's order.
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
    def eqns(self) -> tuple[JaxprEqn, ...]:
        """The equation and its callers, innermost first."""
        return (self.eqn, *reversed(self.callers))

    @property
    def location(self) -> _origin.Location | None:
        """The user's line that led to the equation."""
        found = map(_origin.location, self.eqns)
        return next((line for line in found if line is not None), None)


class Measured(NamedTuple):
    """An output and its statistics."""

    output: Output
    statistics: Statistics


class Ledger:
    """What was measured, output by output, and what was computed from what."""

    def __init__(self) -> None:
        self._found: dict[int, Measured] = {}
        self._producers: list[frozenset[int]] = []

    def number(self, producers: Iterable[int]) -> int:
        """A number for a further output, given those that its operands came from."""
        self._producers.append(frozenset(producers))
        return len(self._producers) - 1

    @property
    def size(self) -> int:
        """How many outputs there are."""
        return len(self._producers)

    def producers(self, number: int) -> frozenset[int]:
        """The outputs that the operands of an output came from."""
        return self._producers[number]

    def get(self, number: int) -> Measured | None:
        """What was measured at an output; None if it has not run."""
        return self._found.get(number)

    def ancestors(self, numbers: Iterable[int]) -> dict[int, None]:
        """The outputs that values from these outputs were computed from, nearest first.

        These outputs themselves are among them.
        """
        found = dict.fromkeys(numbers)
        nearest = list(found)
        while nearest:
            further = (self._producers[number] for number in nearest)
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
        self,
        output: Output,
        pair: Pair,
        operands: Sequence[State],
        iteration: int | None,
    ) -> State:
        """Measures a result; returns its state."""
        statistics, state = measure(pair, operands, iteration)
        known = self._found.get(output.number)
        if known is not None:
            statistics = known.statistics.merge(statistics)
        self._found[output.number] = Measured(output, statistics)
        return state

    @property
    def measured(self) -> list[Measured]:
        """What was measured, in the program's order."""
        return [self._found[number] for number in sorted(self._found)]


class Tracked(NamedTuple):
    """A value of the walk.

    Attributes:
      pair: what it is in both runs.
      state: how far it is from float32's, or, inside a loop, where that will be found;
        None for what is not measured.
      scaled: whether it depends on the loss scale.
      producers: the outputs that it came from.
    """

    pair: Pair
    state: Any
    scaled: bool
    producers: frozenset[int]


@dataclass(frozen=True)
class Nesting:
    """What an equation stands in: named scopes, and the equations that call it."""

    scope: Scope = field(default_factory=Scope)
    callers: tuple[JaxprEqn, ...] = ()

    def enter(self, eqn: JaxprEqn) -> Nesting:
        """What the program that an equation holds stands in."""
        scope = self.scope.enter(eqn.source_info.name_stack)
        return Nesting(scope, (*self.callers, eqn))
