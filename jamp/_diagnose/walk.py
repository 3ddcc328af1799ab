"""Walks through a program in two runs at once, and measures every equation of it.

What a jit, a checkpoint or a function with derivative rules holds is walked through
where it stands, equation by equation. How often a loop runs and which branch is taken
is decided in the run under autocast, for both.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._compat import scan_counts
from jamp._diagnose.ledger import Ledger, Measured, Nesting, Tracked
from jamp._diagnose.measure import Pair, is_measured, measure, state_of
from jamp._diagnose.shadow import EXACTLY, as_pair, run_pair
from jamp._equations import bind, equations
from jamp._plan.equation import closed

Steps = dict[Hashable, Callable[..., list[Pair]]]


@dataclass(frozen=True)
class Walk:
    """One walk through a program.

    Attributes:
      steps: compiled equations, which several walks may share.
      advance: called after each equation.
      ledger: holds what is measured.
      iteration: that of the loop around the program, if there is one.
    """

    steps: Steps
    advance: Callable[[], object]
    ledger: Ledger
    iteration: int | None = None

    def entering(
        self, pair: Pair, scaled: bool = False, producers: frozenset[int] = frozenset()
    ) -> Tracked:
        """A value that enters a program."""
        measured = is_measured(jax.typeof(pair.computed))
        return Tracked(pair, state_of(pair) if measured else None, scaled, producers)

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
        runs = {"cond": self._cond, "scan": self._scan, "while": self._while}
        if name in runs:
            results = runs[name](eqn, operands, nesting.enter(eqn))
        else:
            results = self._plain(eqn, operands, nesting)
        if self.iteration is None:
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
                statistics, state = measure(pair, states, self.iteration)
                found = Measured(
                    eqn=eqn,
                    dtype=_dtypes.dtype_of(var),
                    scope=scope,
                    callers=nesting.callers,
                    scaled=scaled,
                    producers=producers,
                    statistics=statistics,
                )
                number = self.ledger.note(var, found)
                value = Tracked(pair, state, scaled, frozenset({number}))
            values.append(value)
        return values

    def _bind(self, eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
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

    def _cond(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        index, branches = int(operands[0].pair.computed), eqn.params["branches"]
        taken = min(max(index, 0), len(branches) - 1)
        return self.run(branches[taken], operands[1:], nesting)

    def _scan(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        start, count = scan_counts(eqn.params)
        stop = start + count
        consts, carry, xs = operands[:start], operands[start:stop], operands[stop:]
        indices = range(eqn.params["length"])
        if eqn.params["reverse"]:
            indices = indices[::-1]
        rows: dict[int, list[Tracked]] = {}
        for iteration, index in enumerate(indices):
            slices = [
                self.entering(_slice(x.pair, index), x.scaled, x.producers) for x in xs
            ]
            values = [*consts, *carry, *slices]
            inner = replace(self, iteration=iteration)
            results = inner.run(eqn.params["jaxpr"], values, nesting)
            carry = _carried(results[:count], operands[start:stop])
            rows[index] = results[count:]
        if not rows:
            # What is stacked then has no elements.
            arrays = bind(eqn, [operand.pair.computed for operand in operands])
            ys = [self.entering(as_pair(array)) for array in arrays[count:]]
        else:
            columns = zip(*(rows[index] for index in sorted(rows)), strict=True)
            ys = [self._stacked(column) for column in columns]
        return self._left([*carry, *ys], operands, nesting)

    def _stacked(self, values: Sequence[Tracked]) -> Tracked:
        """What a scan returns of the results of its iterations."""
        pair = jax.tree.map(_stack, *(value.pair for value in values))
        return self.entering(pair, any(value.scaled for value in values))

    def _while(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        split, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        tested, consts = operands[:split], operands[split : split + count]
        first = carry = operands[split + count :]
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])
        iteration = 0
        while (holds := _test(condition, tested, carry)).any():
            inner = replace(self, iteration=iteration)
            results = inner.run(eqn.params["body_jaxpr"], [*consts, *carry], nesting)
            carry = _going_on(holds, _carried(results, first), carry)
            iteration += 1
        return self._left(carry, operands, nesting)

    def _left(
        self, results: Sequence[Tracked], operands: Sequence[Tracked], nesting: Nesting
    ) -> list[Tracked]:
        """The results of a loop: all that is inside may have led to each of them."""
        inside = self.ledger.inside(nesting)
        producers = inside.union(*(operand.producers for operand in operands))
        return [result._replace(producers=producers) for result in results]


def _test(
    condition: Callable[..., Any], tested: Sequence[Tracked], carry: Sequence[Tracked]
) -> np.ndarray[Any, Any]:
    """Whether a loop goes on, for each member of a batch if it was batched."""
    return np.asarray(condition(*(v.pair.computed for v in (*tested, *carry)))[0])


def _going_on(
    holds: np.ndarray[Any, Any], new: Sequence[Tracked], old: Sequence[Tracked]
) -> list[Tracked]:
    """The carry of the members of a batch that go on, and the old one of the others."""

    def chosen(after: Any, before: Any) -> Any:
        mask = holds.reshape(holds.shape + (1,) * (after.ndim - holds.ndim))
        return jax.numpy.where(mask, after, before)

    if holds.all():
        return list(new)
    return [
        after._replace(pair=jax.tree.map(chosen, after.pair, before.pair))
        for after, before in zip(new, old, strict=True)
    ]


def _slice(pair: Pair, index: int) -> Pair:
    # With an ellipsis, NumPy gives an array of a vector's element too.
    found: Pair = jax.tree.map(lambda array: array[index, ...], pair)
    return found


def _stack(*arrays: Any) -> Any:
    # NumPy compiles nothing; it has no keys.
    numpy_has = isinstance(arrays[0].dtype, np.dtype)
    return np.stack(arrays) if numpy_has else jnp.stack(arrays)


def _carried(results: Sequence[Tracked], first: Sequence[Tracked]) -> list[Tracked]:
    """What the next iteration takes: as if it came from where the first one came.

    So no output leads to itself.
    """
    return [
        result._replace(producers=value.producers)
        for result, value in zip(results, first, strict=True)
    ]


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
