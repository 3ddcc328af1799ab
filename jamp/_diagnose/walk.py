"""Walks through a program in two runs at once, and measures every equation of it.

What a jit, a checkpoint or a function with derivative rules holds is walked through
where it stands, equation by equation. How often a loop runs and which branch is taken
is decided in the run under autocast, for both. In the other run, 16-bit dtypes are
widened to float32. A `shard_map` is one equation, of which the other run is widened as
a whole.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jamp import _dtypes, _primitives
from jamp._compat import scan_counts, settings
from jamp._diagnose.measure import (
    Measured,
    Pair,
    Tracked,
    entering,
    has_shadow,
    tracked,
)
from jamp._diagnose.widened import run_wide, runs_once
from jamp._equations import binding, walks
from jamp._tracing.regions import Scope, modules

# XLA may otherwise leave out the roundings that are to be measured.
EXACTLY = {"xla_allow_excess_precision": False}

Steps = dict[Hashable, Callable[..., list[Pair]]]
Values = Sequence[Tracked]


@dataclass(frozen=True)
class Walk:
    steps: Steps  # compiled equations, which several walks may share
    advance: Callable[[], object]  # called after each equation
    measured: dict[Hashable, Measured]  # what is measured, in the program's order
    scope: Scope  # the named scopes around the program
    holders: tuple[JaxprEqn, ...] = ()  # the equations that hold it, innermost first
    iteration: int | None = None  # that of the loop around the program, if there is one

    def run(self, program: Any, values: Values) -> list[Tracked]:
        program = walks.closed(program)
        jaxpr = program.jaxpr
        env: dict[Any, Tracked] = dict(zip(jaxpr.invars, values, strict=True))
        consts = map(entering, program.consts)
        env.update(zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Tracked:
            if not isinstance(atom, Literal):
                return env[atom]
            return entering(np.asarray(atom.val, _dtypes.dtype_of(atom)))

        def touched(eqn: JaxprEqn) -> list[Any]:
            return [*walks.read_by(eqn), *eqn.outvars]

        last = {var: eqn for eqn in jaxpr.eqns for var in touched(eqn)}
        kept = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
            for var in touched(eqn):
                if last[var] is eqn and var not in kept:
                    env.pop(var, None)
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: JaxprEqn, operands: Values) -> list[Tracked]:
        name = eqn.primitive.name
        if name in _primitives.CALLS:
            return self._inside(eqn).run(eqn.params[_primitives.CALLS[name]], operands)
        with _as_traced(eqn):
            results = _RUNS.get(name, Walk._plain)(self, eqn, operands)
        if self.iteration is None:
            self.advance()
        return results

    def _inside(self, eqn: JaxprEqn) -> Self:
        scope = self.scope.enter(eqn.source_info.name_stack)
        return replace(self, scope=scope, holders=(eqn, *self.holders))

    def _plain(self, eqn: JaxprEqn, operands: Values) -> list[Tracked]:
        pairs = self._bind(eqn, [operand.pair for operand in operands])
        scaled = any(operand.scaled for operand in operands)
        producers = _producers(operands)
        before = [x.statistics for x in operands if x.statistics is not None]
        eqns, values = (eqn, *self.holders), []
        scope = modules(self.scope.enter(eqn.source_info.name_stack).names)
        for var, pair in zip(eqn.outvars, pairs, strict=True):
            value = tracked(pair, scaled, producers)
            if value.statistics is not None:
                place = len(self.measured), eqns, _dtypes.dtype_of(var), scope
                statistics = value.statistics.after(before, self.iteration)
                found = Measured(*place, scaled, producers, statistics)
                known = self.measured.setdefault((*eqns, var), found)
                if known is not found:
                    known.merge(found)
                value = value._replace(producers=frozenset({known}))
            values.append(value)
        return values

    def _bind(self, eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
        dtypes = tuple(map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars)))
        key: Hashable = (eqn.primitive, tuple(eqn.params.items()), eqn.ctx, dtypes)
        try:
            step = self.steps.get(key)
        except TypeError:  # some parameters have no hash
            key, step = eqn, self.steps.get(eqn)
        if step is None:
            step = jax.jit(partial(run_pair, eqn), compiler_options=EXACTLY)
            self.steps[key] = step
        return step(operands)

    def _cond(self, eqn: JaxprEqn, operands: Values) -> list[Tracked]:
        index, branches = int(operands[0].pair.computed), eqn.params["branches"]
        taken = min(max(index, 0), len(branches) - 1)
        # As a whole it counts for one.
        inside = replace(self._inside(eqn), advance=lambda: None)
        return inside.run(branches[taken], operands[1:])

    def _scan(self, eqn: JaxprEqn, operands: Values) -> list[Tracked]:
        start, count = scan_counts(eqn.params)
        stop = start + count
        consts, carry, xs = operands[:start], operands[start:stop], operands[stop:]
        indices = range(eqn.params["length"])
        if eqn.params["reverse"]:
            indices = indices[::-1]
        rows: dict[int, list[Tracked]] = {}
        inside = self._inside(eqn)
        for iteration, index in enumerate(indices):
            # With an ellipsis, NumPy gives an array of a vector's element too.
            take = partial(jax.tree.map, itemgetter((index, ...)))
            slices = [tracked(take(x.pair), x.scaled, x.producers) for x in xs]
            inner = replace(inside, iteration=iteration)
            results = inner.run(eqn.params["jaxpr"], [*consts, *carry, *slices])
            carry = _carried(results[:count], operands[start:stop])
            rows[index] = results[count:]

        def stack(*arrays: Any) -> Any:
            # NumPy compiles nothing; it has no keys.
            return (np if _is_numpys(arrays[0].dtype) else jnp).stack(arrays)

        ys = []
        for column in zip(*(rows[index] for index in sorted(rows)), strict=True):
            pair = jax.tree.map(stack, *(value.pair for value in column))
            ys.append(tracked(pair, any(value.scaled for value in column)))
        if not rows:
            # What is stacked then has no elements.
            arrays = binding.bind(eqn, [x.pair.computed for x in operands])
            ys = list(map(entering, arrays[count:]))
        return inside._left([*carry, *ys], operands)

    def _while(self, eqn: JaxprEqn, operands: Values) -> list[Tracked]:
        split, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        tested, consts = operands[:split], operands[split : split + count]
        first = carry = operands[split + count :]
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])
        inside, iteration = self._inside(eqn), 0

        def test(values: Values) -> Any:
            # Whether it goes on, for each member of a batch if it was batched.
            return np.asarray(condition(*(value.pair.computed for value in values))[0])

        while (holds := test([*tested, *carry])).any():
            inner = replace(inside, iteration=iteration)
            results = inner.run(eqn.params["body_jaxpr"], [*consts, *carry])
            carry = _going_on(holds, _carried(results, first), carry)
            iteration += 1
        return inside._left(carry, operands)

    def _left(self, results: Values, operands: Values) -> list[Tracked]:
        """The results of a loop: all that is inside may have led to each of them."""
        around = slice(-len(self.holders), None)
        inside = {m for m in self.measured.values() if m.eqns[around] == self.holders}
        producers = _producers(operands) | inside
        return [result._replace(producers=producers) for result in results]


_RUNS = {"cond": Walk._cond, "scan": Walk._scan, "while": Walk._while}


@contextmanager
def _as_traced(eqn: JaxprEqn) -> Iterator[None]:
    """The settings of an equation; JAX does not say whether x64 was one of them."""
    dtypes = filter(_is_numpys, map(_dtypes.dtype_of, walks.atoms([eqn])))
    doubles = any(dtype != jax.dtypes.canonicalize_dtype(dtype) for dtype in dtypes)
    with settings(eqn), jax.enable_x64(True) if doubles else nullcontext():
        yield


def _is_numpys(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype)


def _producers(values: Iterable[Tracked]) -> frozenset[Measured]:
    return frozenset[Measured]().union(*(value.producers for value in values))


def _going_on(holds: Any, new: Values, old: Values) -> list[Tracked]:
    """The carry of the members of a batch that go on, and the old one of the others."""

    def chosen(after: Any, before: Any) -> Any:
        mask = holds.reshape(holds.shape + (1,) * (after.ndim - holds.ndim))
        return jnp.where(mask, after, before)

    if holds.all():
        return list(new)
    return [
        after._replace(pair=jax.tree.map(chosen, after.pair, before.pair))
        for after, before in zip(new, old, strict=True)
    ]


def _carried(results: Values, first: Values) -> list[Tracked]:
    """What the next iteration takes: with its producers, no output leads to itself."""
    return [
        result._replace(producers=value.producers)
        for result, value in zip(results, first, strict=True)
    ]


def run_pair(eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
    """Runs an equation without inner programs, or one that cannot be looked into."""
    computed = binding.bind(eqn, [operand.computed for operand in operands])
    shadowed = [has_shadow(var.aval) for var in eqn.outvars]
    if runs_once(eqn) or not any(shadowed):
        shadows = list(map(_dtypes.widened, computed))
    else:
        shadows = run_wide(eqn, [operand.shadow for operand in operands])
    each = zip(computed, shadows, shadowed, strict=True)
    return [Pair(array, shadow if own else array) for array, shadow, own in each]
