"""Loops and branches in two runs at once, which call back to be measured.

How often a loop runs and which branch is taken is decided in the run under autocast,
for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jamp._compat import scan_counts
from jamp._diagnose.ledger import Ledger, Nesting, Output, Tracked
from jamp._diagnose.measure import Pair, State
from jamp._diagnose.shadow import EXACTLY
from jamp._diagnose.walk import Walk


def run_scan(
    walk: Walk, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
) -> list[Tracked]:
    """Runs a scan."""
    start, count = scan_counts(eqn.params)
    stop = start + count
    program = eqn.params["jaxpr"]
    flags = _settled(program, [operand.scaled for operand in operands], start, stop)
    body = _observed(walk, program, operands, flags, nesting)

    def loop(operands: Sequence[Pair]) -> list[Pair]:
        consts, carry, xs = operands[:start], operands[start:stop], operands[stop:]

        def step(state: Any, slices: Any) -> Any:
            iteration, carry = state
            results = body([*consts, *carry, *slices], iteration)
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
    body = _observed(walk, program, operands[split:], flags, nesting)

    def loop(operands: Sequence[Pair]) -> list[Pair]:
        tested, consts = operands[:split], operands[split : split + count]

        def proceed(state: Any) -> Any:
            arrays = [pair.computed for pair in (*tested, *state[1])]
            return jaxpr_as_fun(condition)(*arrays)[0]

        def step(state: Any) -> Any:
            iteration, carry = state
            return iteration + 1, body([*consts, *carry], iteration)

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
    bodies = [_observed(walk, branch, rest, flags, nesting) for branch in branches]

    def switch(pairs: Sequence[Pair]) -> list[Pair]:
        results: list[Pair] = jax.lax.switch(index, bodies, pairs, walk.iteration)
        return results

    return _finished(walk, switch, rest, [any(flags)] * len(eqn.outvars))


class _Notes:
    """Stands for the ledger while a program is traced, and calls it when it runs."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pairs: list[Pair] = []
        self._notes: list[tuple[Output | None, Sequence[int]]] = []

    def note(
        self,
        output: Output | None,
        pair: Pair,
        operands: Sequence[int] = (),
        iteration: Any = None,
    ) -> int:
        """Notes what the ledger is to measure; returns its number."""
        del iteration
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
                known = [states[number] for number in operands]
                states.append(self._ledger.note(output, pair, known, int(iteration)))


def _observed(
    walk: Walk,
    program: Any,
    operands: Sequence[Tracked],
    flags: Sequence[bool],
    nesting: Nesting,
) -> Callable[[Sequence[Pair], Any], list[Pair]]:
    """A function that runs a program, to be traced: it is measured when it runs.

    `flags` say which of its operands carry the loss scale in some iteration.
    """
    producers = [operand.producers for operand in operands]

    def run(pairs: Sequence[Pair], iteration: Any) -> list[Pair]:
        notes = _Notes(walk.ledger)
        inner = replace(walk, advance=lambda: None, observer=notes, iteration=iteration)
        values = list(map(inner.entering, pairs, flags, producers))
        results = inner.run(program, values, nesting)
        notes.send(iteration)
        return [result.pair for result in results]

    return run


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
    # Every output inside may have led to any of the loop's results.
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
