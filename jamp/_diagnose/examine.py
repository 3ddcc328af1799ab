"""Examinations: a program walked through once, or only run again and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jamp import _dtypes
from jamp._diagnose.judge import (
    Fault,
    Verdict,
    error_limit,
    find_faults,
    judge,
)
from jamp._diagnose.ledger import Ledger, Measured
from jamp._diagnose.measure import LOWEST_EXPONENT, is_measured
from jamp._diagnose.program import (
    Outcome,
    Program,
    Settings,
    Subject,
    make_program,
)
from jamp._diagnose.shadow import EXACTLY, as_pair
from jamp._diagnose.walk import Steps, Walk, count_equations

# A loss scale fits if at most this share of the gradients' elements is too small.
TOO_SMALL = 0.1


@dataclass(frozen=True)
class Examination:
    """What one walk through a program found.

    Attributes:
      settings: how it was run.
      measured: its operations.
      outcomes: its results.
      faults: the operations at fault.
    """

    settings: Settings
    measured: list[Measured]
    outcomes: list[Outcome]
    faults: list[Fault]


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
    walk = Walk(steps, advance, ledger)
    scale = None if settings.loss_scale is None else len(program.arrays) - 1
    # Values that are not finite are expected here.
    with np.errstate(all="ignore"):
        values = [
            walk.entering(as_pair(array), scaled=index == scale)
            for index, array in enumerate(program.arrays)
        ]
        results = walk.run(program.closed, values)
        outcomes = [
            Outcome.of(label, gradient, value.pair, value.producers)
            for label, gradient, value in _floating(program, results)
        ]
    limit = error_limit(settings.options.dtype, _roundings(ledger.measured))
    faults = find_faults(judge(outcomes, limit), ledger)
    return Examination(settings, ledger.measured, outcomes, faults)


def run_again(subject: Subject, settings: Settings, before: Examination) -> Verdict:
    """Runs a program under other settings, compiled, and compares its results.

    They are compared with those in float32, which the examination before knows.
    """
    program = make_program(subject, settings)
    run = jax.jit(jaxpr_as_fun(program.closed), compiler_options=EXACTLY)
    factor = (settings.loss_scale or 1.0) / (before.settings.loss_scale or 1.0)
    with np.errstate(all="ignore"):
        computed = [array for _, _, array in _floating(program, run(*program.arrays))]
        outcomes = [
            outcome.against(array, factor)
            for outcome, array in zip(before.outcomes, computed, strict=True)
        ]
    return judge(
        outcomes, error_limit(settings.options.dtype, _roundings(before.measured))
    )


def _roundings(measured: Sequence[Measured]) -> int:
    """How many operations round to 16 bits."""
    return sum(_dtypes.narrow(m.dtype) for m in measured)


def _floating(program: Program, results: Sequence[Any]) -> list[tuple[str, bool, Any]]:
    """Label, whether it is a gradient, and result, of the results that are measured."""
    first = len(results) - program.gradients
    avals = program.closed.out_avals
    return [
        (label, index >= first, result)
        for index, (label, result) in enumerate(
            zip(program.labels, results, strict=True)
        )
        if is_measured(avals[index])
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
