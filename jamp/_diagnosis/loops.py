"""Loops and branches in two runs at once, which call back to be measured.

How often a loop runs and which branch is taken is decided in the run under autocast,
for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jamp._compat import scan_counts
from jamp._diagnosis.ledger import Ledger, Nesting, Output, Tracked
from jamp._diagnosis.measure import Pair, State
from jamp._diagnosis.shadow import EXACTLY
from jamp._diagnosis.walk import Walk


def run_scan(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
) -> list[Tracked]:
    """Runs a scan."""
    start, count = scan_counts(eqn.params)
    stop = start + count
    program = eqn.params["jaxpr"]
    flags = _settled(program, [operand.scaled for operand in operands], start, stop)
    producers = [operand.producers for operand in operands]

    def loop(operands: Sequence[Pair]) -> list[Pair]:
        consts, carry, xs = operands[:start], operands[start:stop], operands[stop:]

        def step(state: Any, slices: Any) -> Any:
            iteration, carry = state
            pairs = [*consts, *carry, *slices]
            results = _observed(
                walk, program, pairs, flags, producers, nesting, iteration
            )
            return (iteration + 1, results[:count]), results[count:]

        (_, carry), ys = jax.lax.scan(
            step,
            (np.int32(0), carry),
            xs,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        return [*carry, *ys]

    return _finished(walk, loop, operands, _spread(program, flags))


def run_while(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
) -> list[Tracked]:
    """Runs a while loop."""
    split, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    program, condition = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    flags = [operand.scaled for operand in operands[split:]]
    flags = _settled(program, flags, count, len(flags))
    producers = [operand.producers for operand in operands[split:]]

    def loop(operands: Sequence[Pair]) -> list[Pair]:
        tested, consts = operands[:split], operands[split : split + count]

        def proceed(state: Any) -> Any:
            arrays = [pair.computed for pair in (*tested, *state[1])]
            return jaxpr_as_fun(condition)(*arrays)[0]

        def step(state: Any) -> Any:
            iteration, carry = state
            pairs = [*consts, *carry]
            results = _observed(
                walk, program, pairs, flags, producers, nesting, iteration
            )
            return iteration + 1, results

        start = (np.int32(0), list(operands[split + count :]))
        results: list[Pair] = jax.lax.while_loop(proceed, step, start)[1]
        return results

    return _finished(walk, loop, operands, _spread(program, flags))


def run_cond(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
) -> list[Tracked]:
    """Runs the branch that the run under autocast takes."""
    index, rest = operands[0].pair.computed, operands[1:]
    branches = eqn.params["branches"]
    if walk.eager:
        taken = min(max(int(index), 0), len(branches) - 1)
        return walk.run(branches[taken], rest, nesting)
    flags = [operand.scaled for operand in rest]
    producers = [operand.producers for operand in rest]

    def function(branch: Any) -> Callable[..., list[Pair]]:
        return lambda *pairs: _observed(
            walk, branch, pairs, flags, producers, nesting, walk.iteration
        )

    functions = list(map(function, branches))

    def switch(pairs: Sequence[Pair]) -> list[Pair]:
        results: list[Pair] = jax.lax.switch(index, functions, *pairs)
        return results

    return _finished(walk, switch, rest, [any(flags)] * len(eqn.outvars))


class _Notes:
    """Stands for the ledger while a program is traced, and calls it when it runs."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pairs: list[Pair] = []
        self._notes: list[tuple[Output | None, Sequence[int]]] = []

    def entering(self, pair: Pair) -> int:
        """Notes a value that enters the program; returns its number."""
        return self._add(pair, None, ())

    def note(
        self, output: Output, pair: Pair, operands: Sequence[int], iteration: Any
    ) -> int:
        """Notes a result; returns its number."""
        del iteration
        return self._add(pair, output, operands)

    def _add(self, pair: Pair, output: Output | None, operands: Sequence[int]) -> int:
        self._pairs.append(pair)
        self._notes.append((output, operands))
        return len(self._notes) - 1

    def send(self, iteration: Any) -> None:
        """Has all of it measured whenever the traced program runs."""
        if any(output is not None for output, _ in self._notes):
            io_callback(self._receive, None, iteration, self._pairs)

    def _receive(self, iteration: Any, pairs: Sequence[Pair]) -> None:
        states: list[State] = []
        with np.errstate(all="ignore"):
            for (output, operands), pair in zip(self._notes, pairs, strict=True):
                pair = Pair(*map(np.asarray, pair))
                if output is None:
                    states.append(self._ledger.entering(pair))
                else:
                    known = [states[number] for number in operands]
                    states.append(
                        self._ledger.note(output, pair, known, int(iteration))
                    )


def _observed(
    walk: Walk,
    program: Any,
    pairs: Sequence[Pair],
    flags: Sequence[bool],
    producers: Sequence[frozenset[int]],
    nesting: Nesting,
    iteration: Any,
) -> list[Pair]:
    """Runs a program while it is traced, so that it is measured when it runs."""
    notes = _Notes(walk.ledger)
    inner = walk.inside(notes, iteration)
    values = list(map(inner.entering, pairs, flags, producers))
    results = inner.run(program, values, nesting)
    notes.send(iteration)
    return [result.pair for result in results]


def _finished(
    walk: Walk,
    loop: Callable[..., list[Pair]],
    operands: Sequence[Tracked],
    scaled: Sequence[bool],
) -> list[Tracked]:
    """The results of a loop, compiled unless it stands in another one."""
    first = walk.ledger.size
    pairs = [operand.pair for operand in operands]
    if walk.eager:
        pairs = jax.block_until_ready(jax.jit(loop, compiler_options=EXACTLY)(pairs))
        jax.effects_barrier()
    else:
        pairs = loop(pairs)
    # All that is computed in a loop may have led to any of its results.
    inside = range(first, walk.ledger.size)
    producers = frozenset(inside).union(*(operand.producers for operand in operands))
    return [
        walk.entering(pair, flag, producers)
        for pair, flag in zip(pairs, scaled, strict=True)
    ]


def _settled(program: Any, flags: Sequence[bool], start: int, stop: int) -> list[bool]:
    """Which arguments of a loop's body carry the loss scale in some iteration."""
    while True:
        results = _spread(program, flags)[: stop - start]
        carried = [a or b for a, b in zip(flags[start:stop], results, strict=True)]
        settled = [*flags[:start], *carried, *flags[stop:]]
        if settled == list(flags):
            return settled
        flags = settled


def _spread(program: Any, flags: Sequence[bool]) -> list[bool]:
    """Which results of a program depend on arguments that carry the loss scale."""
    jaxpr = program.jaxpr
    scaled = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for eqn in jaxpr.eqns:
        if any(not isinstance(a, Literal) and a in scaled for a in eqn.invars):
            scaled.update(eqn.outvars)
    return [not isinstance(a, Literal) and a in scaled for a in jaxpr.outvars]


RUNS: Mapping[str, Callable[..., list[Tracked]]] = {
    "cond": run_cond,
    "scan": run_scan,
    "while": run_while,
}
