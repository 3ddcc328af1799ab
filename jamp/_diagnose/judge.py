"""What a walk through a program found, and what of it counts as a fault."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes
from jamp._diagnose.measure import (
    LOWEST_EXPONENT,
    Measured,
    Pair,
    Statistics,
    entering,
    led_to,
    measure,
    path_to,
)
from jamp._diagnose.program import Program, Settings, Subject
from jamp._diagnose.walk import EXACTLY, Steps, Walk
from jamp._dtypes import narrow
from jamp._equations import equations
from jamp._plan.plain import is_explicit
from jamp._primitives import CALLS, FUNCTIONS, MOVEMENT
from jamp._tracing.regions import Scope

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
# A result is rounding only if errors of float32's last digits change it by this share.
NOISE = 0.05
# A result has underflowed if more of it is below the normal numbers of its dtype.
UNDERFLOWED = 0.5
# Operations that introduced at least this share of what the worst of them did.
SUSPECT = 0.5
# A loss scale fits if at most this share of the gradients' elements is too small.
TOO_SMALL = 0.1


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
    terms: float = 0.0  # of a loss, the largest number that it is the difference of

    def beside(self, computed: Any, shadow: Any) -> Self:
        """It with what other runs computed."""
        return replace(self, pair=Pair(np.asarray(computed), np.asarray(shadow)))

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


class Fault(NamedTuple):
    kind: str  # `'overflow'`, `'underflow'`, `'precision'` or `'float32'`
    measured: Measured | None  # None if an argument or a constant is not finite


def error_limit(dtype: Any, measured: Iterable[Measured] = ()) -> float:
    """The largest relative error that rounding explains."""
    roundings = max(sum(narrow(m.dtype) for m in measured), FEWEST_ROUNDINGS)
    return ROUNDINGS * float(jnp.finfo(dtype).eps) * math.sqrt(roundings)


def gradient_error(outcomes: Sequence[Outcome]) -> float:
    """The relative error of all gradients together, as of one vector."""
    gradients = [o for o in outcomes if o.gradient and o.noise < NOISE]
    power = sum(outcome.power for outcome in gradients)
    error = sum(each.power * each.error**2 for each in gradients if each.power)
    return math.sqrt(error / power) if power else 0.0


def judge(outcomes: Sequence[Outcome], limit: float) -> Verdict:
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    largest = max((outcome.mean for outcome in gradients), default=0.0)
    gradient_wrong = gradient_error(outcomes) > max(limit, GRADIENT_ERROR)

    def is_wrong(outcome: Outcome) -> bool:
        found, mean = outcome.statistics, outcome.mean
        if found.overflowed:
            return True
        if outcome.noise >= NOISE:
            return False
        if not outcome.gradient:
            # What cancels in a loss has the rounding of its terms.
            return found.error > limit * max(1.0, outcome.terms / (mean or math.inf))
        lost = found.lost > LOST and mean > NEGLIGIBLE * largest
        alone = found.error > ONE_GRADIENT_ERROR and mean > TINY * largest
        return lost or alone or gradient_wrong

    wrong = list(filter(is_wrong, outcomes))
    wild = [outcome for outcome in outcomes if outcome.statistics.wild]
    unlike = [outcome for outcome in wild if not outcome.alike]
    return Verdict(unlike if unlike or wrong else wild, wrong)


def kind_of(measured: Measured, share: float = UNDERFLOWED) -> str:
    """The kind of fault; it underflowed if more than a share of it is too small."""
    found = measured.statistics
    # Only small numbers underflow; a difference may be zero for another reason.
    lowest = int(jnp.finfo(measured.dtype).minexp)
    small = found.exponents[: max(0, lowest - LOWEST_EXPONENT)].sum()
    return "underflow" if small > share * found.nonzero else "precision"


def find_faults(verdict: Verdict) -> list[Fault]:
    wild, path = (
        path_to(m for outcome in outcomes for m in outcome.producers)
        for outcomes in verdict
    )
    faults: list[Fault] = []
    if verdict.wild:
        began = [m for m in wild if m.statistics.wild_began]
        faults.append(Fault("float32", began[0] if began else None))
    overflowed = one_per_line(m for m in path if m.statistics.began)
    found = list(map(_overflow, overflowed))
    if not overflowed:
        found = [Fault(kind_of(m), m) for m in map(_beginning, _suspects(path))]
    return [*faults, *one_per_line(found, attrgetter("measured.line"))]


def one_per_line(found: Iterable[Any], line: Any = attrgetter("line")) -> list[Any]:
    """The first of each line and module, forward and backward."""
    first: dict[Any, Any] = {}
    for each in found:
        first.setdefault(line(each), each)
    return list(first.values())


def made_by(rounding: Measured) -> Measured:
    """What computed the numbers that a cast rounds which the user did not write."""
    if not rounding.cast or is_explicit(rounding.eqns[0]):
        return rounding
    found = rounding
    while found is rounding or found.primitive in MOVEMENT:
        if len(found.producers) != 1:
            return rounding
        (found,) = found.producers
    # A gradient is told at the line whose derivative it is.
    return rounding if rounding.scaled and found.line != rounding.line else found


def behind(fault: Fault) -> list[Measured]:
    """The operations in 16 bits that led to a fault, nearest first, one per line."""
    found = led_to(fault.measured.operands) if fault.measured else []
    return one_per_line(m for m in found if narrow(m.dtype))


def _beginning(found: Measured) -> Measured:
    """The operation behind one that only passes an error on, or amplifies it."""
    while _passes_on(found):
        wrong = [m for m in found.producers if m.statistics.error]
        if len(wrong) != 1:
            break
        (found,) = wrong
    return found


def _passes_on(measured: Measured) -> bool:
    """Whether an operation rounds by far less than its result is wrong."""
    found = measured.statistics
    if found.introduced != found.introduced_once:
        # In a loop, the carry may have brought the error.
        return False
    if not narrow(measured.dtype) or not found.introduced:
        return True
    return (
        measured.primitive in FUNCTIONS
        and kind_of(measured) == "precision"
        and found.error > ROUNDINGS * float(jnp.finfo(measured.dtype).eps)
    )


def _suspects(path: Sequence[Measured]) -> list[Measured]:
    """The operations in which most of an error began, the worst first."""
    worst = max((m.statistics.blame for m in path), default=0.0)
    found = [m for m in path if m.statistics.blame >= SUSPECT * worst > 0]
    return sorted(found, key=lambda m: -m.statistics.blame)


def _overflow(measured: Measured) -> Fault:
    """The fault behind a result that is not finite.

    A result that the dtype could hold is not finite because of an operand: one that
    became zero and is divided by, or one that was negative by its error only.
    """
    if measured.statistics.largest > float(jnp.finfo(measured.dtype).max):
        return Fault("overflow", measured)
    cause, zeros = measured, [measured]
    while zeros:
        cause = zeros[0]
        zeros = [m for m in cause.operands if m.statistics.flushed]
    if cause is not measured:
        # A single zero that is divided by is a fault.
        return Fault(kind_of(cause, share=0.0), cause)
    suspects = _suspects(path_to(measured.producers))
    if not suspects:
        return Fault("overflow", measured)
    return Fault(kind_of(suspects[0]), suspects[0])


def _terms(measured: Measured) -> float:
    """The largest of the numbers whose sum or difference an output is."""
    if measured.primitive in ("add", "neg", "sub"):
        return max(map(_terms, measured.producers), default=0.0)
    return measured.statistics.largest


@dataclass(frozen=True)
class Examination:
    settings: Settings  # how it was run
    measured: list[Measured]  # its operations
    outcomes: list[Outcome]  # its results
    faults: list[Fault]  # the operations at fault

    @property
    def at_fault(self) -> list[Measured]:
        return [fault.measured for fault in self.faults if fault.measured]


def examine(
    subject: Subject,
    settings: Settings,
    steps: Steps,
    progress: Callable[[int], AbstractContextManager[Callable[[], object]]],
) -> Examination:
    """Walks through a program; `progress` takes its length, and gives what counts."""
    program = subject.program(settings)
    values = [entering(array) for array in program.arrays]
    if settings.loss_scale is not None:
        values[-1] = values[-1]._replace(scaled=True)
    found: dict[Any, Measured] = {}
    inlined = equations(program.closed, lambda eqn: eqn.primitive.name in CALLS)
    with progress(sum(eqn.primitive.name not in CALLS for eqn in inlined)) as advance:
        results = Walk(steps, advance, found, Scope()).run(program.closed, values)
    measured, first = list(found.values()), len(results) - len(subject.differentiated)
    labelled = zip(program.labels, results, strict=True)
    outcomes = [
        Outcome(label, index >= first, index, result.pair, result.producers)
        for index, (label, result) in enumerate(labelled)
        if result.statistics is not None
    ]
    if settings.loss_scale is not None:
        terms = max(map(_terms, outcomes[0].producers), default=0.0)
        outcomes[0] = replace(outcomes[0], terms=terms)
    limit = error_limit(settings.options.dtype, measured)
    verdict = judge(outcomes, limit)
    if verdict.spoiled and not any(math.isinf(outcome.error) for outcome in outcomes):
        outcomes = _settled(subject, settings, outcomes)
        verdict = judge(outcomes, limit)
    return Examination(settings, measured, outcomes, find_faults(verdict))


def _settled(
    subject: Subject, settings: Settings, outcomes: list[Outcome]
) -> list[Outcome]:
    """Outcomes beside float32 run by itself, which takes branches and steps of its own.

    It runs twice: what changes with the last digits of its arguments is rounding only.
    """
    options = replace(settings.options, enabled=False)
    program = subject.program(replace(settings, options=options))
    vars_ = (v for e in equations(program.closed) for v in (*e.invars, *e.outvars))
    if any(narrow(_dtypes.dtype_of(var)) for var in vars_):
        return outcomes  # it casts by itself
    rng = np.random.default_rng(0)
    nudged = [
        array * (1 + 2.0**-22 * rng.choice([-1, 1], array.shape).astype(array.dtype))
        if jnp.issubdtype(array.dtype, jnp.floating)
        else array
        for array in program.arrays
    ]
    run = _compiled(program)
    alone, other = run(*program.arrays), run(*nudged)
    found = []
    for old in outcomes:
        plain = alone[old.index]
        noise = old.beside(other[old.index], plain).statistics.error
        nearer = min(old, old.beside(old.pair.computed, plain), key=lambda o: o.error)
        found.append(replace(nearer, noise=noise))
    return found


def run_again(subject: Subject, settings: Settings, before: Examination) -> Verdict:
    """Runs a program compiled, and compares it with the float32 of an examination."""
    program = subject.program(settings)
    results = _compiled(program)(*program.arrays)
    factor = (settings.loss_scale or 1.0) / (before.settings.loss_scale or 1.0)
    outcomes = []
    for old in before.outcomes:
        scale = np.float32(factor if old.gradient else 1.0)
        shadow = np.asarray(old.pair.shadow) * scale
        outcomes.append(old.beside(results[old.index], shadow))
    return judge(outcomes, error_limit(settings.options.dtype, before.measured))


def _compiled(program: Program) -> Callable[..., Any]:
    return jax.jit(jaxpr_as_fun(program.closed), compiler_options=EXACTLY)


def scale_window(examination: Examination) -> tuple[float, float] | None:
    """The smallest and the largest loss scale at which gradients fit the dtype."""
    scale, dtype = examination.settings.loss_scale, examination.settings.options.dtype
    gradients = [
        m.statistics
        for m in examination.measured
        if m.scaled and m.dtype == dtype and m.statistics.nonzero
    ]
    info = jnp.finfo(dtype)
    # A dtype with the range of float32 needs no loss scale.
    wide = info.maxexp == jnp.finfo(_dtypes.FLOAT32).maxexp
    if scale is None or wide or not gradients:
        return None
    largest = max(statistics.largest for statistics in gradients) / scale
    counts = np.sum([statistics.exponents for statistics in gradients], axis=0)
    below = np.cumsum(counts) / counts.sum()
    bin_of_small = int(np.searchsorted(below, TOO_SMALL))
    # The ends of the histogram also count all that lies outside of it.
    if bin_of_small in (0, len(counts) - 1) or any(s.wild for s in gradients):
        return None
    small = LOWEST_EXPONENT + bin_of_small - np.log2(scale)
    low = 2.0 ** np.ceil(np.log2(float(info.smallest_subnormal)) - small)
    high = 2.0 ** np.floor(np.log2(float(info.max) / largest))
    return float(low), float(high)
