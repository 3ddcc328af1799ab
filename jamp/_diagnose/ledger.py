"""What a walk through a program keeps: its values, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _primitives as primitives
from jamp._diagnose.measure import Pair, State, Statistics
from jamp._tracing import origin
from jamp._tracing.regions import Scope


@dataclass(frozen=True, eq=False)
class Measured:
    """One result of an equation of the program, which was measured.

    Attributes:
      number: counts the outputs in the program's order.
      eqn: the equation.
      dtype: the dtype of the result.
      scope: the named scopes around it, outermost first.
      callers: the equations whose programs it stands in, outermost first.
      scaled: whether the result carries the loss scale: it is part of a gradient.
      statistics: what was measured, over all the times that the equation ran.
    """

    number: int
    eqn: JaxprEqn
    dtype: Any
    scope: tuple[str, ...]
    callers: tuple[JaxprEqn, ...]
    scaled: bool
    statistics: Statistics

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


class Ledger:
    """What was measured, output by output, and what was computed from what."""

    def __init__(self) -> None:
        self._found: dict[int, Measured] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._producers: list[frozenset[int]] = []

    def number(self, nesting: Nesting, var: Any, producers: frozenset[int]) -> int:
        """The number of an output, given those that its operands came from."""
        number = self._numbers.setdefault((*nesting.key, id(var)), len(self._producers))
        if number == len(self._producers):
            self._producers.append(producers)
        # In another iteration of a loop, another branch may be taken.
        self._producers[number] |= producers
        return number

    def inside(self, nesting: Nesting) -> frozenset[int]:
        """The outputs that stand in an equation's program, or in those inside."""
        key = nesting.key
        return frozenset(n for k, n in self._numbers.items() if k[: len(key)] == key)

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

    def note(self, measured: Measured) -> None:
        """Keeps what was measured of an output, beside what is known of it."""
        known = self._found.get(measured.number)
        if known is not None:
            measured = replace(
                known,
                scaled=known.scaled or measured.scaled,
                statistics=known.statistics.merge(measured.statistics),
            )
        self._found[measured.number] = measured

    @property
    def measured(self) -> list[Measured]:
        """What was measured, in the program's order."""
        return [self._found[number] for number in sorted(self._found)]


class Tracked(NamedTuple):
    """A value of the walk.

    Attributes:
      pair: what it is in both runs.
      state: how far it is from float32's; None for what is not measured.
      scaled: whether it depends on the loss scale.
      producers: the outputs that it came from.
    """

    pair: Pair
    state: State | None
    scaled: bool
    producers: frozenset[int]


@dataclass(frozen=True)
class Nesting:
    """What an equation stands in: named scopes, and the equations that call it."""

    scope: Scope = field(default_factory=Scope)
    callers: tuple[JaxprEqn, ...] = ()

    @property
    def key(self) -> tuple[int, ...]:
        """What identifies it."""
        return tuple(map(id, self.callers))

    def enter(self, eqn: JaxprEqn) -> Nesting:
        """What the program that an equation holds stands in."""
        scope = self.scope.enter(eqn.source_info.name_stack)
        return Nesting(scope, (*self.callers, eqn))
