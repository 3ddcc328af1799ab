"""What counts as a fault: thresholds, and the operations in which faults began."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jamp._diagnosis.program import Outcome
from jamp._diagnosis.walk import Ledger, Measured

# Roundings that are independent of each other add up as the root of their number. What
# is further from float32 than this many times as much is no rounding any more.
ROUNDINGS = 2.0
# A short program may hold a cancellation or two: it has as much room as one with so
# many roundings.
FEWEST_ROUNDINGS = 64
# ReLU and max pooling pass a gradient on or not: a tie that is decided otherwise moves
# it as a whole. Healthy networks have errors of a tenth.
GRADIENT_ERROR = 0.25
# A gradient is lost if elements that became zero held more than this share of it ...
LOST = 0.1
# ... unless all of it is smaller than this, beside the largest one: of what the loss
# does not depend on, such as a bias in front of a normalization, it is rounding only.
NEGLIGIBLE = 1e-5
# A result with more than this share of its elements below the dtype's normal numbers
# has underflowed.
UNDERFLOWED = 0.5
# Of the operations that introduced an error, those with at least this share of what the
# worst of them introduced.
SUSPECT = 0.5


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the outcomes of a program; false if nothing is.

    Attributes:
      wild: gradients that are not finite in float32 either, and other outcomes that
        are so, and not the same as under autocast.
      alike: outcomes that are not finite in float32, and the same under autocast. As a
        mask of -inf is, they may be meant.
      overflowed: outcomes that are not finite, and are in float32.
      lost: gradients that became zero.
      wrong: outcomes that are too far from float32's.
    """

    wild: tuple[Outcome, ...] = ()
    alike: tuple[Outcome, ...] = ()
    overflowed: tuple[Outcome, ...] = ()
    lost: tuple[Outcome, ...] = ()
    wrong: tuple[Outcome, ...] = ()

    @property
    def spoiled(self) -> bool:
        """Whether more is wrong than what is the same in float32."""
        return bool(self.wild or self.overflowed or self.lost or self.wrong)

    def __bool__(self) -> bool:
        return self.spoiled or bool(self.alike)


@dataclass(frozen=True)
class Fault:
    """An operation in which something went wrong.

    Attributes:
      kind: `'overflow'`, `'underflow'`, `'precision'` or `'float32'`.
      measured: the operation; None if an argument or a constant is not finite.
    """

    kind: str
    measured: Measured | None


def error_limit(dtype: Any, roundings: int) -> float:
    """The largest relative error that rounding explains."""
    unit = float(jnp.finfo(dtype).eps)
    return ROUNDINGS * unit * math.sqrt(max(roundings, FEWEST_ROUNDINGS))


def gradient_error(outcomes: Sequence[Outcome]) -> float:
    """The relative error of all gradients together, as of one vector."""
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    power = sum(outcome.power for outcome in gradients)
    error = sum(
        outcome.power * outcome.error**2 for outcome in gradients if outcome.power
    )
    return math.sqrt(error / power) if power else 0.0


def judge(outcomes: Sequence[Outcome], limit: float) -> Verdict:
    """Which outcomes of a program are wrong."""
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    largest = max((outcome.mean for outcome in gradients), default=0.0)
    gradient_wrong = gradient_error(outcomes) > max(limit, GRADIENT_ERROR)

    def select(test: Callable[[Outcome], Any]) -> tuple[Outcome, ...]:
        return tuple(filter(test, outcomes))

    def meant(outcome: Outcome) -> bool:
        return not outcome.gradient and outcome.state.wild == outcome.state.alike

    return Verdict(
        wild=select(lambda o: o.state.wild and not meant(o)),
        alike=select(lambda o: o.state.wild and meant(o)),
        overflowed=select(lambda o: o.state.overflowed),
        lost=select(
            lambda o: (
                o.gradient and o.state.lost > LOST and o.mean > NEGLIGIBLE * largest
            )
        ),
        wrong=select(lambda o: gradient_wrong if o.gradient else o.state.error > limit),
    )


def find_faults(verdict: Verdict, ledger: Ledger) -> list[Fault]:
    """The operations that are at fault.

    Args:
      verdict: what is wrong with the outcomes.
      ledger: what was measured.
    """

    def path_to(outcomes: Sequence[Outcome]) -> list[Measured]:
        sites = ledger.led_to(site for outcome in outcomes for site in outcome.origins)
        return [m for m in ledger.measured if m.site.number in sites]

    faults: list[Fault] = []
    wild = verdict.wild if verdict.spoiled else verdict.alike
    if wild:
        began = [m for m in path_to(wild) if m.statistics.wild_began]
        faults.append(Fault("float32", began[0] if began else None))
    path = path_to((*verdict.overflowed, *verdict.lost, *verdict.wrong))
    overflowed = [m for m in path if m.statistics.began]
    if overflowed:
        return [*faults, *(_overflow(m, ledger) for m in _one_per_line(overflowed))]
    suspects = _one_per_line(_suspects(path))
    return [*faults, *(Fault(_kind(m), m) for m in suspects)]


def _suspects(path: Sequence[Measured]) -> list[Measured]:
    """The operations in which most of an error began, the worst first."""
    worst = max((m.statistics.blame for m in path), default=0.0)
    found = [m for m in path if m.statistics.blame >= SUSPECT * worst > 0]
    return sorted(found, key=lambda m: -m.statistics.blame)


def _overflow(measured: Measured, ledger: Ledger) -> Fault:
    """The fault behind a result that is not finite.

    A result that the dtype could hold is not finite because of an operand: one that
    became zero and is divided by, or one that was negative by its error only.
    """
    site = measured.site
    if measured.statistics.largest > float(jnp.finfo(site.dtype).max):
        return Fault("overflow", measured)
    cause, zeros = measured, [measured]
    while zeros:
        cause = zeros[0]
        operands = map(ledger.get, ledger.origins(cause.site.number))
        zeros = [m for m in operands if m is not None and m.statistics.flushed]
    if cause is not measured:
        return Fault("underflow", cause)
    before = ledger.led_to(ledger.origins(site.number))
    suspects = _suspects([m for m in ledger.measured if m.site.number in before])
    return (
        Fault(_kind(suspects[0]), suspects[0])
        if suspects
        else Fault("overflow", measured)
    )


def _kind(measured: Measured) -> str:
    found = measured.statistics
    small = found.flushed + found.subnormal
    return "underflow" if small > UNDERFLOWED * found.nonzero else "precision"


def _one_per_line(found: Sequence[Measured]) -> list[Measured]:
    """The first of each line and module, forward and backward."""
    first: dict[Any, Measured] = {}
    for measured in found:
        site = measured.site
        first.setdefault((site.location, site.scope, site.scaled), measured)
    return list(first.values())
