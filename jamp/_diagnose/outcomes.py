"""The results of a diagnosed program in two runs, and which of them are wrong."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from jamp._diagnose.measure import Measured, Pair, Statistics, measure
from jamp._dtypes import below_float32

# The error of independent roundings grows with the root of their number. An error of
# more than this many times that is not explained by rounding.
ROUNDINGS = 2.0
# A short program is allowed the error of at least this many, for cancellations.
FEWEST_ROUNDINGS = 64
# Healthy networks have errors of a tenth: rounding decides ties in ReLU and max pooling
# otherwise, and with them which elements a gradient reaches.
GRADIENT_ERROR = 0.25
# One gradient is wrong if it is this far off, and not tiny beside the largest one.
ONE_GRADIENT_ERROR = 0.5
TINY = 1e-3
# A gradient is lost if elements that became zero held more than this share of it ...
LOST = 0.1
# ... unless all of it is smaller than this, beside the largest one: of what the loss
# does not depend on, such as a bias in front of a normalization, it is rounding only.
NEGLIGIBLE = 1e-5
# What errors of float32's last digits change by this share is rounding: a gradient, and
# a result that is next to nothing beside what it adds up.
NOISE = 0.05


@dataclass(frozen=True)
class Outcome:
    """A result of the program, or a gradient, in two runs."""

    label: str  # what it is
    gradient: bool  # whether it is a gradient
    index: int  # which of the results it is
    pair: Pair
    producers: frozenset[Measured]  # the outputs that it came from
    # The share of it that float32's last digits change, where that was tried.
    noise: float = 0.0
    # Its relative change, where that was tried, if weights in float32 are moved by half
    # a rounding to 16 bits.
    moved: float = 0.0
    terms: float = 0.0  # of a loss, the largest number that it is the difference of
    # Of a result that is noise, the largest number that it is a sum or a mean of.
    added: float = 0.0

    def beside(self, computed: Any, shadow: Any) -> Self:
        """It with what other runs computed."""
        return replace(self, pair=comparable(computed, shadow))

    @cached_property
    def statistics(self) -> Statistics:
        return measure(self.pair)

    @cached_property
    def power(self) -> float:
        """Its sum of squares in float32."""
        shadow = np.asarray(self.pair.shadow, np.float64)
        return float(np.sum(np.square(shadow[np.isfinite(shadow)])))

    @property
    def mean(self) -> float:
        return math.sqrt(self.power / self.pair.shadow.size)

    @property
    def error(self) -> float:
        """Its relative error; inf if it is not finite."""
        found = self.statistics
        return math.inf if found.overflowed or found.wild else found.error

    @property
    def alike(self) -> bool:
        """Whether what is not finite in float32 is the same in 16 bits."""
        return not self.gradient and self.statistics.wild == self.statistics.alike


def comparable(computed: Any, shadow: Any) -> Pair:
    """A result in two runs, in NumPy's arrays; of complex numbers both parts."""
    arrays = map(np.asarray, (computed, shadow))
    return Pair(
        *(np.stack([a.real, a.imag]) if a.dtype.kind == "c" else a for a in arrays)
    )


class Verdict(NamedTuple):
    # Outcomes that are not finite in float32 either. Those that are the same under
    # autocast may be meant, as a mask of -inf is, and are left out if others are wrong.
    wild: list[Outcome]
    # Outcomes that are not finite, and are in float32; gradients that became zero; and
    # what is too far from float32's for another reason.
    wrong: list[Outcome]

    @property
    def spoiled(self) -> bool:
        """Whether more is wrong than what is the same in float32."""
        return bool(self.wrong) or not all(outcome.alike for outcome in self.wild)


def error_limit(dtype: Any, measured: Iterable[Measured] = ()) -> float:
    """The largest relative error that rounding explains."""
    roundings = max(sum(below_float32(m.dtype) for m in measured), FEWEST_ROUNDINGS)
    return ROUNDINGS * float(jnp.finfo(dtype).eps) * math.sqrt(roundings)


def gradient_error(outcomes: Iterable[Outcome]) -> float | None:
    """The relative error of all gradients together, as of one vector.

    Inf if one is not finite; None if all that there are is rounding.
    """
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    if any(math.isinf(outcome.error) for outcome in gradients):
        return math.inf
    return _together(gradients, attrgetter("error"))


def gradient_moved(outcomes: Iterable[Outcome]) -> float:
    """The relative change of all gradients that weights moved by a rounding give."""
    return _together(outcomes, attrgetter("moved")) or 0.0


def _together(
    outcomes: Iterable[Outcome], error: Callable[[Outcome], float]
) -> float | None:
    gradients = [o for o in outcomes if o.gradient and o.noise < NOISE and o.power]
    power = sum(outcome.power for outcome in gradients)
    found = sum(outcome.power * error(outcome) ** 2 for outcome in gradients)
    return math.sqrt(found / power) if power else None


def verdict_of(outcomes: Sequence[Outcome], limit: float) -> Verdict:
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    largest = max((outcome.mean for outcome in gradients), default=0.0)
    moved = gradient_moved(outcomes)
    explained = max(limit, GRADIENT_ERROR, ROUNDINGS * moved)
    gradient_wrong = (_together(outcomes, attrgetter("error")) or 0.0) > explained

    def is_wrong(outcome: Outcome) -> bool:
        found, mean = outcome.statistics, outcome.mean
        if found.overflowed:
            return True
        if outcome.noise >= NOISE:
            off = found.error * mean > limit * max(mean, outcome.added)
            return off and not outcome.gradient
        if not outcome.gradient:
            # What cancels in a loss has the rounding of its terms.
            return found.error > limit * max(1.0, outcome.terms / (mean or math.inf))
        lost = found.lost > LOST and mean > NEGLIGIBLE * largest
        alone = max(ONE_GRADIENT_ERROR, ROUNDINGS * max(outcome.moved, moved))
        off = found.error > alone and mean > TINY * largest
        return lost or off or gradient_wrong

    wrong = list(filter(is_wrong, outcomes))
    wild = [outcome for outcome in outcomes if outcome.statistics.wild]
    unlike = [outcome for outcome in wild if not outcome.alike]
    return Verdict(unlike if unlike or wrong else wild, wrong)
