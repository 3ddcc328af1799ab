"""What a walk through a program keeps: its values, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _primitives as primitives
from jamp._diagnose.measure import Pair, State, Statistics, measure, state_of
from jamp._tracing import origin
from jamp._tracing.regions import Scope


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
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def matmul(self) -> bool:
        """Whether it is a matmul or a convolution."""
        return self.primitive in primitives.MATMULS

    @property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        """The equation and its callers, innermost first."""
        return (self.eqn, *reversed(self.callers))

    @property
    def location(self) -> origin.Location | None:
        """The user's line that led to the equation."""
        found = map(origin.location, self.eqns)
        return next((line for line in found if line is not None), None)


@dataclass(frozen=True, eq=False)
class Measured(Output):
    """An output that was measured.

    Attributes:
      statistics: what was measured, over all the times that the equation ran.
    """

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

    def operands(self, measured: Measured) -> list[Measured]:
        """The outputs that an output was computed from."""
        return self._known(self._producers[measured.number])

    def behind(self, measured: Measured) -> list[Measured]:
        """All that led to an output, nearest first."""
        return self._known(self._ancestors(self._producers[measured.number]))

    def led_to(self, numbers: Iterable[int]) -> list[Measured]:
        """These outputs and all that led to them, in the program's order."""
        return self._known(sorted(self._ancestors(numbers)))

    def _known(self, numbers: Iterable[int]) -> list[Measured]:
        """What was measured at these outputs; some may not have run."""
        return [self._found[number] for number in numbers if number in self._found]

    def _ancestors(self, numbers: Iterable[int]) -> dict[int, None]:
        """These outputs and all that led to them, nearest first."""
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

    def note(
        self,
        output: Output | None,
        pair: Pair,
        operands: Sequence[State] = (),
        iteration: int | None = None,
    ) -> State:
        """Measures an output, or a value that enters a program; returns its state."""
        if output is None:
            return state_of(pair)
        statistics, state = measure(pair, operands, iteration)
        known = self._found.get(output.number)
        if known is not None:
            statistics = known.statistics.merge(statistics)
        self._found[output.number] = Measured(**vars(output), statistics=statistics)
        return state

    @property
    def measured(self) -> list[Measured]:
        """What was measured, in the program's order."""
        return [self._found[number] for number in sorted(self._found)]


class Tracked(NamedTuple):
    """A value of the walk.

    Attributes:
      pair: what it is in both runs.
      state: how far it is from float32's, or, inside a loop, the number under which it
        is noted; None for what is not measured.
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
