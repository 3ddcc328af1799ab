"""Walks through a program in two runs at once, and measures every equation of it.

What a jit, a checkpoint or a function with derivative rules holds is walked through
where it stands, equation by equation; of a branch, the one that the run under autocast
takes. A loop is compiled as a whole, and calls back in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._diagnose.ledger import Ledger, Nesting, Output, Tracked
from jamp._diagnose.measure import Pair, is_measured
from jamp._diagnose.shadow import EXACTLY, as_pair, run_pair
from jamp._equations import equations
from jamp._plan.equation import closed

Steps = dict[Hashable, Callable[..., list[Pair]]]


@dataclass(frozen=True)
class Walk:
    """One walk through a program.

    Attributes:
      runs: what runs a loop or a branch, by its primitive.
      steps: compiled equations, which several walks may share.
      advance: called after each equation.
      ledger: holds what is measured.
      observer: what measures: the ledger, or what stands for it inside a loop.
      iteration: that of the loop around the program, if there is one.
    """

    runs: Mapping[str, Callable[..., list[Tracked]]]
    steps: Steps
    advance: Callable[[], object]
    ledger: Ledger
    observer: Any
    iteration: Any = None

    @property
    def eager(self) -> bool:
        """Whether values are arrays; inside a loop they are traced."""
        return self.observer is self.ledger

    def entering(
        self, pair: Pair, scaled: bool = False, producers: frozenset[int] = frozenset()
    ) -> Tracked:
        """A value that enters a program."""
        measured = is_measured(jax.typeof(pair.computed))
        state = self.observer.note(None, pair) if measured else None
        return Tracked(pair, state, scaled, producers)

    def run(
        self, program: Any, values: Sequence[Tracked], nesting: Nesting | None = None
    ) -> list[Tracked]:
        """Runs a program on values, and measures its equations."""
        nesting, program = nesting or Nesting(), closed(program)
        jaxpr = program.jaxpr
        env: dict[Any, Tracked] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, program.consts, strict=True):
            env[var] = self.entering(as_pair(const))

        def read(atom: Any) -> Tracked:
            if not isinstance(atom, Literal):
                return env[atom]
            literal = np.asarray(atom.val, _dtypes.dtype_of(atom))
            return self.entering(as_pair(literal))

        unused = _unused_after(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, list(map(read, eqn.invars)), nesting)
            env.update(zip(eqn.outvars, results, strict=True))
            for var in unused[index]:
                env.pop(var, None)
        return list(map(read, jaxpr.outvars))

    def _equation(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        name = eqn.primitive.name
        if name in primitives.CALLS:
            program = eqn.params[primitives.CALLS[name]]
            return self.run(program, operands, nesting.enter(eqn))
        if name in self.runs:
            results = self.runs[name](self, eqn, operands, nesting.enter(eqn))
        else:
            results = self._plain(eqn, operands, nesting)
        self.advance()
        return results

    def _plain(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        pairs = self._bind(eqn, [operand.pair for operand in operands])
        scaled = any(operand.scaled for operand in operands)
        states = [operand.state for operand in operands if operand.state is not None]
        names = nesting.scope.enter(eqn.source_info.name_stack).names
        scope = tuple(name for name in names if not _is_of_jax(name))
        producers = frozenset().union(*(operand.producers for operand in operands))
        values = []
        for var, pair in zip(eqn.outvars, pairs, strict=True):
            value = Tracked(pair, None, scaled, producers)
            if is_measured(var.aval):
                number, dtype = self.ledger.number(producers), _dtypes.dtype_of(var)
                output = Output(number, eqn, dtype, scope, nesting.callers, scaled)
                state = self.observer.note(output, pair, states, self.iteration)
                value = Tracked(pair, state, scaled, frozenset({number}))
            values.append(value)
        return values

    def _bind(self, eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
        if not self.eager:
            return run_pair(eqn, operands)
        dtypes = tuple(map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars)))
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), eqn.ctx, dtypes)
        try:
            known = key in self.steps
        except TypeError:
            key, known = eqn, False
        if not known:
            self.steps[key] = jax.jit(
                lambda *operands: run_pair(eqn, operands), compiler_options=EXACTLY
            )
        return self.steps[key](*operands)


def _is_of_jax(name: str) -> bool:
    """Whether JAX itself opened a scope: for a checkpoint, or an einsum."""
    return name in ("checkpoint", "rematted_computation") or "->" in name


def _unused_after(jaxpr: Any) -> list[list[Any]]:
    """For each equation, the variables that nothing reads from then on."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys(eqn.outvars, index))
        atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        last.update(dict.fromkeys(atoms, index))
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    unused: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for var, index in last.items():
        unused[index].append(var)
    return unused


def count_equations(program: Any) -> int:
    """How many equations a walk goes through, a loop counted as one."""

    def is_call(eqn: JaxprEqn) -> bool:
        return eqn.primitive.name in primitives.CALLS

    return sum(not is_call(eqn) for eqn in equations(program, is_call))
