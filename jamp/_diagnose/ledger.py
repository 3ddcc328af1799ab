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
      eqn: the equation.
      dtype: the dtype of the result.
      scope: the named scopes around it, outermost first.
      callers: the equations whose programs it stands in, outermost first.
      scaled: whether the result carries the loss scale: it is part of a gradient.
      producers: numbers of the outputs that it was computed from.
      statistics: what was measured, over all the times that the equation ran.
    """

    eqn: JaxprEqn
    dtype: Any
    scope: tuple[str, ...]
    callers: tuple[JaxprEqn, ...]
    scaled: bool
    producers: frozenset[int]
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

    def merge(self, other: Measured) -> Measured:
        """The output with what was measured in another iteration of a loop."""
        # In another iteration, another branch may be taken.
        return replace(
            self,
            scaled=self.scaled or other.scaled,
            producers=self.producers | other.producers,
            statistics=self.statistics.merge(other.statistics),
        )


class Ledger:
    """What was measured, output by output, and what was computed from what.

    Attributes:
      measured: the outputs in the program's order, in which they are numbered.
    """

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def note(self, var: Any, found: Measured) -> int:
        """Keeps what was measured of a variable; returns the number of the output."""
        key = (*map(id, found.callers), id(var))
        number = self._numbers.setdefault(key, len(self.measured))
        if number == len(self.measured):
            self.measured.append(found)
        else:
            self.measured[number] = self.measured[number].merge(found)
        return number

    def inside(self, nesting: Nesting) -> frozenset[int]:
        """The outputs that stand in an equation's program, or in those inside."""
        key = tuple(map(id, nesting.callers))
        return frozenset(n for k, n in self._numbers.items() if k[: len(key)] == key)

    def operands(self, measured: Measured) -> list[Measured]:
        """The outputs that an output was computed from."""
        return [self.measured[number] for number in measured.producers]

    def behind(self, measured: Measured) -> list[Measured]:
        """All that led to an output, nearest first."""
        return [self.measured[n] for n in self._ancestors(measured.producers)]

    def led_to(self, numbers: Iterable[int]) -> list[Measured]:
        """These outputs and all that led to them, in the program's order."""
        return [self.measured[n] for n in sorted(self._ancestors(numbers))]

    def _ancestors(self, numbers: Iterable[int]) -> dict[int, None]:
        """These outputs and all that led to them, nearest first."""
        found = dict.fromkeys(numbers)
        nearest = list(found)
        while nearest:
            further = (self.measured[number].producers for number in nearest)
            nearest = [
                number
                for number in dict.fromkeys(chain.from_iterable(map(sorted, further)))
                if number not in found
            ]
            found.update(dict.fromkeys(nearest))
        return found


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

    def enter(self, eqn: JaxprEqn) -> Nesting:
        """What the program that an equation holds stands in."""
        scope = self.scope.enter(eqn.source_info.name_stack)
        return Nesting(scope, (*self.callers, eqn))
