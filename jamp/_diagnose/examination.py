"""Runs of a program beside float32, by itself or operation by operation."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes
from jamp._compat import transformations
from jamp._diagnose.judge import Fault, find_faults
from jamp._diagnose.measure import LOWEST_EXPONENT, Measured, entering, is_compared
from jamp._diagnose.outcomes import (
    NOISE,
    Outcome,
    Verdict,
    comparable,
    error_limit,
    verdict_of,
)
from jamp._diagnose.program import Program, Settings, Subject
from jamp._diagnose.walk import EXACTLY, Steps, Walk
from jamp._diagnose.widened import without_marks
from jamp._dtypes import below_float32
from jamp._equations.walks import atoms, equations
from jamp._primitives import CALLS, MOVEMENT, SUMS
from jamp._tracing.regions import OUTSIDE, Scope

# A loss scale fits if at most this share of the gradients' elements is too small.
TOO_SMALL = 0.1
# A gradient of few elements may stay where it is by chance.
_DRAWS = 2
# Of what makes a sum or difference, and of what makes a mean too.
_ADDED = frozenset({"add", "neg", "sub"})
_SUMMED = _ADDED | SUMS | MOVEMENT | {"div", "mul"}


def _largest(outputs: Iterable[Measured], through: Collection[str]) -> float:
    """The largest number that outputs are made of by some primitives."""
    largest, seen, ahead = 0.0, set(), [*outputs]
    while ahead:
        term = ahead.pop()
        if id(term) in seen:
            continue
        seen.add(id(term))
        if term.primitive in through:
            ahead += term.producers
        else:
            largest = max(largest, term.statistics.largest)
    return largest


@dataclass(frozen=True)
class Examination:
    """A run of a program beside float32, and what was found in it."""

    settings: Settings  # how it was run
    measured: list[Measured]  # its operations
    outcomes: list[Outcome]  # its results
    faults: list[Fault]  # the operations at fault

    @property
    def at_fault(self) -> list[Measured]:
        return [fault.measured for fault in self.faults if fault.measured]


def examine(
    subject: Subject,
    steps: Steps,
    progress: Callable[[int], AbstractContextManager[Callable[[], object]]],
    settings: Settings,
) -> Examination:
    """Walks through a program; `progress` takes its length, and gives what counts."""
    program = subject.program(settings)
    closed = without_marks(program.closed)
    values = [entering(array) for array in program.arrays]
    if settings.loss_scale is not None:
        values[-1] = values[-1]._replace(scaled=True)
    found: dict[Any, Measured] = {}
    inlined = equations(closed, lambda eqn: eqn.primitive.name in CALLS, once=False)
    with progress(sum(eqn.primitive.name not in CALLS for eqn in inlined)) as advance:
        results = Walk(steps, advance, found, Scope()).run(closed, values)
    measured, first = list(found.values()), len(results) - len(subject.differentiated)
    labelled = zip(program.labels, results, strict=True)
    outcomes = [
        Outcome(
            label, index >= first, index, comparable(*result.pair), result.producers
        )
        for index, (label, result) in enumerate(labelled)
        if is_compared(jax.typeof(result.pair.shadow))
    ]
    if settings.loss_scale is not None:
        terms = _largest(outcomes[0].producers, _ADDED)
        outcomes[0] = replace(outcomes[0], terms=terms)
    limit = error_limit(settings.options.dtype, measured)
    verdict = verdict_of(outcomes, limit)
    if verdict.spoiled and _is_as_it_runs(settings):
        # A gradient that it takes of a part under autocast is one of a program in which
        # products give float32 for weights; the walk rounds it.
        outcomes = _run(subject.program(settings, "by itself"), outcomes)
        verdict = verdict_of(outcomes, limit)
    if verdict.spoiled and not any(math.isinf(outcome.error) for outcome in outcomes):
        # Where a result or a step to it is wrong, so is a gradient.
        forward = [m.statistics.error for m in measured if not m.scaled]
        draws = _DRAWS if max(forward, default=0.0) <= limit else 0
        outcomes = _beside_float32_alone(subject, settings, outcomes, draws)
        verdict = verdict_of(outcomes, limit)
    return Examination(settings, measured, outcomes, find_faults(verdict))


def _is_as_it_runs(settings: Settings) -> bool:
    """Whether nothing is changed of a function that is under autocast in parts."""
    return settings.options.source == OUTSIDE and not settings.regions


def _beside_float32_alone(
    subject: Subject, settings: Settings, outcomes: list[Outcome], draws: int
) -> list[Outcome]:
    """Outcomes beside float32 run by itself, which takes branches and steps of its own.

    It runs again from arguments that differ: what changes with their last digits is
    rounding only, and a gradient that 16 bits of the weights alone change as much is
    not wrong by what 16 bits compute.
    """
    program = subject.program(settings, "as written")
    every_atom = atoms(equations(program.closed))
    if any(below_float32(_dtypes.dtype_of(atom)) for atom in every_atom):
        return outcomes  # it casts by itself
    rng, run = np.random.default_rng(0), _compiled(program)
    half = float(jnp.finfo(settings.options.dtype).eps) / 2
    every, alone = range(len(program.arrays)), run(*program.arrays)
    nudged = run(*_nudged(program.arrays, 2.0**-22, every, rng))
    rounded = [
        run(*_nudged(program.arrays, half, subject.weights, rng)) for _ in range(draws)
    ]
    found = []
    for old in outcomes:
        plain = alone[old.index]
        nearer = min(old, old.beside(old.pair.computed, plain), key=lambda o: o.error)
        noise = old.beside(nudged[old.index], plain).statistics.error
        errors = [old.beside(other[old.index], plain).error for other in rounded]
        moved = max(filter(math.isfinite, errors), default=0.0)
        # The walk to what it adds up takes as long as the program is.
        cancels = noise >= NOISE and not old.gradient
        added = _largest(old.producers, _SUMMED) if cancels else 0.0
        found.append(replace(nearer, noise=noise, moved=moved, added=added))
    return found


def _nudged(
    arrays: Sequence[Any], share: float, chosen: Collection[int], rng: Any
) -> list[Any]:
    """Arrays of which some have a share more or less of each of their elements."""
    return [
        array * (1 + share * rng.choice([-1, 1], array.shape).astype(array.dtype))
        if slot in chosen and jnp.issubdtype(array.dtype, jnp.floating)
        else array
        for slot, array in enumerate(arrays)
    ]


def run_again(subject: Subject, settings: Settings, before: Examination) -> Verdict:
    """Runs a program compiled, and compares it with the float32 of an examination."""
    factor = (settings.loss_scale or 1.0) / (before.settings.loss_scale or 1.0)
    outcomes = _run(subject.program(settings), before.outcomes, factor)
    return verdict_of(outcomes, error_limit(settings.options.dtype, before.measured))


def _run(
    program: Program, before: Sequence[Outcome], scale: float = 1.0
) -> list[Outcome]:
    """Outcomes of a compiled program beside float32's, whose gradients are scaled."""
    results = _compiled(program)(*program.arrays)
    return [
        old.beside(
            results[old.index],
            np.asarray(old.pair.shadow) * (scale if old.gradient else 1.0),
        )
        for old in before
    ]


def _compiled(program: Program) -> Callable[..., Any]:
    return jax.jit(jaxpr_as_fun(program.closed), compiler_options=EXACTLY)


def scale_of_skipped(examined: Examination) -> float | None:
    """The scale of a step that loss scaling skips, as a scaled gradient overflowed."""
    lowered = [
        outcome.pair
        for outcome in examined.outcomes
        if outcome.label.endswith(".scaler_state.scale")
        and (outcome.pair.computed < outcome.pair.shadow).all()
    ]
    backward = all(
        any("transpose" in transformations(eqn) for eqn in measured.eqns)
        for measured in examined.at_fault
    )
    return float(lowered[0].shadow.max()) if lowered and backward else None


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
