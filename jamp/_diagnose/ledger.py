"""What a walk through a program keeps: its values, and what was measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _primitives as primitives
from jamp._diagnose.measure import Pair, State, Statistics
from jamp._tracing import origin


@dataclass(frozen=True, eq=False)
class Measured:
    """One result of an equation of the program, which was measured."""

    eqn: JaxprEqn
    dtype: Any  # the dtype of the result
    scope: tuple[str, ...]  # the named scopes around it, outermost first
    # The equations whose programs it stands in, outermost first.
    callers: tuple[JaxprEqn, ...]
    scaled: bool  # whether the result carries the loss scale: it is part of a gradient
    producers: frozenset[int]  # numbers of the outputs that it was computed from
    # What was measured, over all the times that the equation ran.
    statistics: Statistics

    @property
    def primitive(self) -> str:
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
        return next(filter(None, map(origin.location, self.eqns)), None)

    def merge(self, other: Measured) -> Measured:
        """The output with what was measured in another iteration of a loop."""
        # In another iteration, another branch may be taken.
        return replace(
            self,
            scaled=self.scaled or other.scaled,
            producers=self.producers | other.producers,
            statistics=self.statistics.merge(other.statistics),
        )


class Tracked(NamedTuple):
    """A value of the walk."""

    pair: Pair  # what it is in both runs
    state: State | None  # how far it is from float32's; None for what is not measured
    scaled: bool  # whether it depends on the loss scale
    producers: frozenset[int]  # the outputs that it came from


class Ledger:
    """What was measured, output by output, and what was computed from what."""

    def __init__(self) -> None:
        # The outputs in the order of the program, in which they are numbered.
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

    def inside(self, callers: Iterable[JaxprEqn]) -> frozenset[int]:
        """The outputs that stand in the program of the last of some equations."""
        key = tuple(map(id, callers))
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
            further = (sorted(self.measured[number].producers) for number in nearest)
            new = dict.fromkeys(chain.from_iterable(further))
            nearest = [number for number in new if number not in found]
            found.update(dict.fromkeys(nearest))
        return found
