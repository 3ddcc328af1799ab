"""Examinations: a program walked through once, or only run again and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes
from jamp._diagnose.judge import Fault, Outcome, Verdict, find_faults, judge
from jamp._diagnose.measure import LOWEST_EXPONENT, Ledger, Measured, is_measured
from jamp._diagnose.program import Program, Settings, Subject, make_program
from jamp._diagnose.walk import EXACTLY, Steps, Walk, as_pair, count_equations, entering
from jamp._tracing.regions import Scope

# A loss scale fits if at most this share of the gradients' elements is too small.
TOO_SMALL = 0.1


@dataclass(frozen=True)
class Examination:
    """What one walk through a program found."""

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
    """Walks through a program.

    `progress` takes the number of equations; what it returns is called after each.
    """
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
    verdict = judge(outcomes, settings.options.dtype, ledger.measured)
    faults = find_faults(verdict, ledger)
    return Examination(settings, ledger.measured, outcomes, faults)


def run_again(subject: Subject, settings: Settings, before: Examination) -> Verdict:
    """Runs a program under other settings, compiled, and compares its results.

    They are compared with those in float32, which the examination before knows.
    """
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
        if is_measured(aval)
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
    small = LOWEST_EXPONENT + bin_of_small - np.log2(scale)
    low = 2.0 ** np.ceil(np.log2(float(info.smallest_subnormal)) - small)
    high = 2.0 ** np.floor(np.log2(float(info.max) / largest))
    return float(low), float(high)
