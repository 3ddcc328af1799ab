"""What a walk through a program found, and what of it counts as a fault."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes, _primitives
from jamp._diagnose import measure
from jamp._diagnose.measure import Ledger, Measured, Pair, State
from jamp._diagnose.program import Program, Settings, Subject, make_program
from jamp._diagnose.walk import EXACTLY, Steps, Walk, as_pair, count_equations, entering
from jamp._dtypes import narrow
from jamp._equations import equations
from jamp._plan.plain import is_explicit
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
    state: State  # how far it is from float32's
    power: float  # its sum of squares in float32
    shadow: Any = field(repr=False)  # it in float32
    producers: frozenset[int]  # the outputs that it came from
    # The share of it that float32's last digits change, where that was tried.
    noise: float = 0.0
    terms: float = 0.0  # of a loss, the largest number that it is the difference of

    @classmethod
    def of(
        cls, label: str, gradient: bool, pair: Pair, producers: Iterable[int] = ()
    ) -> Self:
        shadow = np.asarray(pair.shadow)
        power = float(np.sum(np.square(shadow[np.isfinite(shadow)].astype(np.float64))))
        came = frozenset(producers)
        return cls(label, gradient, measure.state_of(pair), power, shadow, came)

    @property
    def error(self) -> float:
        """Its relative error; inf if it is not finite."""
        state = self.state
        return math.inf if state.overflowed or state.wild else state.error

    @property
    def mean(self) -> float:
        return math.sqrt(self.power / max(self.shadow.size, 1))

    @property
    def alike(self) -> bool:
        """Whether what is not finite in float32 is the same in 16 bits."""
        return not self.gradient and self.state.wild == self.state.alike

    def against(self, computed: Any, factor: float) -> Self:
        """What a program with another loss scale computed, beside the same float32."""
        shadow = self.shadow * np.float32(factor if self.gradient else 1.0)
        pair = Pair(np.asarray(computed), shadow)
        other = self.of(self.label, self.gradient, pair)
        return replace(other, noise=self.noise, terms=self.terms)


class Verdict(NamedTuple):
    spoiled: bool  # whether more is wrong than what is the same in float32
    # Outcomes that are not finite in float32 either. Those that are the same under
    # autocast may be meant, as a mask of -inf is, and are left out if others are wrong.
    wild: list[Outcome]
    # Outcomes that are not finite, and are in float32; gradients that became zero; and
    # what is too far from float32's for another reason.
    wrong: list[Outcome]


@dataclass(frozen=True)
class Fault:
    kind: str  # `'overflow'`, `'underflow'`, `'precision'` or `'float32'`
    measured: Measured | None  # None if an argument or a constant is not finite
    behind: tuple[Measured, ...] = ()  # 16-bit operations that led to it
    made: Measured | None = None  # if it is a cast of autocast's, what computed that


def error_limit(dtype: Any, roundings: int) -> float:
    """The largest relative error that rounding explains."""
    unit = float(jnp.finfo(dtype).eps)
    return ROUNDINGS * unit * math.sqrt(max(roundings, FEWEST_ROUNDINGS))


def gradient_error(outcomes: Sequence[Outcome]) -> float:
    """The relative error of all gradients together, as of one vector."""
    gradients = [o for o in outcomes if o.gradient and o.noise < NOISE]
    power = sum(outcome.power for outcome in gradients)
    error = sum(each.power * each.error**2 for each in gradients if each.power)
    return math.sqrt(error / power) if power else 0.0


def judge(
    outcomes: Sequence[Outcome], dtype: Any, measured: Sequence[Measured]
) -> Verdict:
    limit = error_limit(dtype, sum(narrow(m.dtype) for m in measured))
    gradients = [outcome for outcome in outcomes if outcome.gradient]
    largest = max((outcome.mean for outcome in gradients), default=0.0)
    gradient_wrong = gradient_error(outcomes) > max(limit, GRADIENT_ERROR)

    def is_wrong(outcome: Outcome) -> bool:
        state, mean = outcome.state, outcome.mean
        if state.overflowed:
            return True
        if outcome.noise >= NOISE:
            return False
        if not outcome.gradient:
            # What cancels in a loss has the rounding of its terms.
            return state.error > limit * max(1.0, outcome.terms / (mean or math.inf))
        lost = state.lost > LOST and mean > NEGLIGIBLE * largest
        alone = state.error > ONE_GRADIENT_ERROR and mean > TINY * largest
        return lost or alone or gradient_wrong

    wrong = list(filter(is_wrong, outcomes))
    wild = [outcome for outcome in outcomes if outcome.state.wild]
    unlike = [outcome for outcome in wild if not outcome.alike]
    spoiled = bool(unlike or wrong)
    return Verdict(spoiled, unlike if spoiled else wild, wrong)


def kind_of(measured: Measured, share: float = UNDERFLOWED) -> str:
    """The kind of fault; it underflowed if more than a share of it is too small."""
    found = measured.statistics
    # Only small numbers underflow; a difference may be zero for another reason.
    small = found.smaller(int(jnp.finfo(measured.dtype).minexp))
    return "underflow" if small > share * found.nonzero else "precision"


def find_faults(verdict: Verdict, ledger: Ledger) -> list[Fault]:
    def path_to(outcomes: Sequence[Outcome]) -> list[Measured]:
        return ledger.led_to(n for outcome in outcomes for n in outcome.producers)

    faults: list[Fault] = []
    if verdict.wild:
        began = [m for m in path_to(verdict.wild) if m.statistics.wild_began]
        faults.append(Fault("float32", began[0] if began else None))
    path = path_to(verdict.wrong)
    overflowed = [m for m in path if m.statistics.began]
    if overflowed:
        found: dict[Any, Fault] = {}
        for measured in _one_per_line(overflowed):
            kind, cause = _overflow(measured, ledger)
            found.setdefault(cause.line, Fault(kind, cause))
        faults += found.values()
    else:
        suspects = [_beginning(m, ledger) for m in _suspects(path)]
        faults += [Fault(kind_of(m), m) for m in _one_per_line(suspects)]
    return [
        replace(f, behind=_behind(f, ledger), made=_made(f.measured, ledger))
        for f in faults
    ]


def _made(rounding: Measured | None, ledger: Ledger) -> Measured | None:
    """What computed the numbers that a cast rounds which the user did not write."""
    if rounding is None or not rounding.cast or is_explicit(rounding.eqn):
        return None
    found = rounding
    while found is rounding or found.primitive in _primitives.MOVEMENT:
        operands = ledger.operands(found)
        if len(operands) != 1:
            return None
        (found,) = operands
    # A gradient is told at the line whose derivative it is.
    return None if rounding.scaled and found.line != rounding.line else found


def _behind(fault: Fault, ledger: Ledger) -> tuple[Measured, ...]:
    """The operations in 16 bits that led to a fault, nearest first, one per line."""
    found = ledger.behind(fault.measured) if fault.measured else []
    return tuple(_one_per_line([m for m in found if narrow(m.dtype)]))


def _beginning(found: Measured, ledger: Ledger) -> Measured:
    """The operation behind one that only passes an error on, or amplifies it."""
    while _passes_on(found):
        wrong = [m for m in ledger.operands(found) if m.statistics.error]
        if len(wrong) != 1:
            break
        found = wrong[0]
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
        measured.primitive in _primitives.FUNCTIONS
        and kind_of(measured) == "precision"
        and found.error > ROUNDINGS * float(jnp.finfo(measured.dtype).eps)
    )


def _suspects(path: Sequence[Measured]) -> list[Measured]:
    """The operations in which most of an error began, the worst first."""
    worst = max((m.statistics.blame for m in path), default=0.0)
    found = [m for m in path if m.statistics.blame >= SUSPECT * worst > 0]
    return sorted(found, key=lambda m: -m.statistics.blame)


def _overflow(measured: Measured, ledger: Ledger) -> tuple[str, Measured]:
    """The kind and the operation of the fault behind a result that is not finite.

    A result that the dtype could hold is not finite because of an operand: one that
    became zero and is divided by, or one that was negative by its error only.
    """
    if measured.statistics.largest > float(jnp.finfo(measured.dtype).max):
        return "overflow", measured
    cause, zeros = measured, [measured]
    while zeros:
        cause = zeros[0]
        zeros = [m for m in ledger.operands(cause) if m.statistics.flushed]
    if cause is not measured:
        # A single zero that is divided by is a fault.
        return kind_of(cause, share=0.0), cause
    suspects = _suspects(ledger.led_to(measured.producers))
    return (kind_of(suspects[0]), suspects[0]) if suspects else ("overflow", measured)


def _one_per_line(found: Sequence[Measured]) -> list[Measured]:
    """The first of each line and module, forward and backward."""
    first: dict[Any, Measured] = {}
    for measured in found:
        first.setdefault(measured.line, measured)
    return list(first.values())


@dataclass(frozen=True)
class Examination:
    settings: Settings  # how it was run
    measured: list[Measured]  # its operations
    outcomes: list[Outcome]  # its results
    faults: list[Fault]  # the operations at fault


def examine(
    subject: Subject,
    settings: Settings,
    steps: Steps,
    progress: Callable[[int], Callable[[], object]],
) -> Examination:
    """Walks through a program; `progress` takes its length, and gives what counts."""
    program = make_program(subject, settings)
    ledger, advance = Ledger(), progress(count_equations(program.closed))
    walk = Walk(steps, advance, ledger, Scope())
    scale = None if settings.loss_scale is None else len(program.arrays) - 1
    # Values that are not finite are expected here.
    with np.errstate(all="ignore"):
        values = [
            entering(as_pair(array), scaled=index == scale)
            for index, array in enumerate(program.arrays)
        ]
        results = walk.run(program.closed, values)
        outcomes = [
            Outcome.of(label, gradient, value.pair, value.producers)
            for label, gradient, value in _floating(program, results)
        ]
    if scale is not None:
        terms = max(map(ledger.terms, outcomes[0].producers), default=0.0)
        outcomes[0] = replace(outcomes[0], terms=terms)
    dtype = settings.options.dtype
    verdict = judge(outcomes, dtype, ledger.measured)
    finite = not any(o.state.overflowed or o.state.wild for o in outcomes)
    if verdict.spoiled and finite:
        outcomes = _settled(subject, settings, outcomes, results)
        verdict = judge(outcomes, dtype, ledger.measured)
    faults = find_faults(verdict, ledger)
    return Examination(settings, ledger.measured, outcomes, faults)


def _settled(
    subject: Subject, settings: Settings, outcomes: list[Outcome], results: Any
) -> list[Outcome]:
    """Outcomes beside float32 run by itself, which takes branches and steps of its own.

    It runs twice: what changes with the last digits of its arguments is rounding only.
    """
    options = replace(settings.options, enabled=False)
    program = make_program(subject, replace(settings, options=options))
    vars_ = (v for e in equations(program.closed) for v in (*e.invars, *e.outvars))
    if any(narrow(getattr(var.aval, "dtype", None)) for var in vars_):
        return outcomes  # it casts by itself
    run = jax.jit(jaxpr_as_fun(program.closed), compiler_options=EXACTLY)
    rng = np.random.default_rng(0)
    nudged = [
        array * (1 + 2.0**-22 * rng.choice([-1, 1], array.shape).astype(array.dtype))
        if jnp.issubdtype(array.dtype, jnp.floating)
        else array
        for array in program.arrays
    ]
    found = []
    with np.errstate(all="ignore"):
        runs = (results, run(*program.arrays), run(*nudged))
        each = zip(outcomes, *(_floating(program, r) for r in runs), strict=True)
        for old, (*_, value), (*_, plain), (*_, other) in each:
            plain = np.asarray(plain)
            pair = Pair(value.pair.computed, plain)
            alone = old.of(old.label, old.gradient, pair, old.producers)
            noise = measure.state_of(Pair(np.asarray(other), plain)).error
            nearer = min(old, alone, key=lambda outcome: outcome.error)
            found.append(replace(nearer, noise=noise, terms=old.terms))
    return found


def run_again(subject: Subject, settings: Settings, before: Examination) -> Verdict:
    """Runs a program compiled, and compares it with the float32 of an examination."""
    program = make_program(subject, settings)
    run = jax.jit(jaxpr_as_fun(program.closed), compiler_options=EXACTLY)
    factor = (settings.loss_scale or 1.0) / (before.settings.loss_scale or 1.0)
    with np.errstate(all="ignore"):
        results = _floating(program, run(*program.arrays))
        outcomes = [
            outcome.against(array, factor)
            for outcome, (_, _, array) in zip(before.outcomes, results, strict=True)
        ]
    return judge(outcomes, settings.options.dtype, before.measured)


def _floating(program: Program, results: Sequence[Any]) -> list[tuple[str, bool, Any]]:
    """Label, whether it is a gradient, and result, of the results that are measured."""
    first = len(results) - program.gradients
    every = zip(program.labels, results, program.closed.out_avals, strict=True)
    return [
        (label, index >= first, result)
        for index, (label, result, aval) in enumerate(every)
        if measure.is_measured(aval)
    ]


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
    small = measure.LOWEST_EXPONENT + bin_of_small - np.log2(scale)
    low = 2.0 ** np.ceil(np.log2(float(info.smallest_subnormal)) - small)
    high = 2.0 ** np.floor(np.log2(float(info.max) / largest))
    return float(low), float(high)
