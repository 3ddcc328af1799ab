"""Functions with rules of their own for derivatives or batching.

What a rule does is known only when JAX asks for it, when the function is differentiated
or batched. It is traced then, as written, through JAX's own transformation, and the
program that results is planned and run under the policy of the function. This is the
only place where something is planned while a plan runs. The rules of equal calls, as of
the relu of every layer, are traced, planned and run once.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.tree_util import Partial

from jamp import _dtypes, _primitives
from jamp._compat import becomes_a_program, may_have_tangents, only_staged
from jamp._emit.conversions import convert
from jamp._emit.emitter import Arrays, Emitter, Places, emits_programs, emitter_of
from jamp._emit.recurring import MADE_OF
from jamp._equations.binding import bind
from jamp._equations.content import content_of
from jamp._equations.walks import closed, constants
from jamp._errors import AutocastError
from jamp._plan.plan import Context, Structural
from jamp._plan.planner import inputs_like, plan_program
from jamp._plan.values import Value, Values
from jamp._tracing.derivative_rules import (
    LOGS,
    VjpRules,
    differentiable,
    rules_of,
    trace_jvp,
    zero_results,
)
from jamp._tracing.locations import frame_key, location
from jamp._tracing.named_axes import in_axes_of_now
from jamp._tracing.regions import Scope
from jamp._tracing.trace import outlived
from jamp._tracing.users_casts import make_jaxpr


@emits_programs("custom_jvp_call")
def emit_custom_jvp(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (inner,), eqn, region = action.plans, action.eqn, action.context.region
    count, current = len(inner.results), emitter_of(emitter)

    def rule(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        places = [
            place for place in differentiable(eqn) if not _is_zero(tangents[place])
        ]
        taken = [tangents[place] for place in places]
        emitter = current()
        key = _rules_key(emitter, eqn, region, *places)
        traced = emitter.rules.once(key, partial(trace_jvp, eqn, region, places))
        program = _checked(eqn, traced)
        # JAX may transpose what computes the tangents.
        context = action.context._replace(transposable=True)
        values = [*_inputs(action), *map(Value, map(jax.typeof, taken))]
        called = _Rule(eqn, program, values, context, inner.result_dtypes * 2)
        outs = called.run(emitter, [*primals, *taken])
        zeros = zero_results(program)[count:]
        return outs[:count], tuple(
            _zero_tangent(tangent, symbolic) if zero else tangent
            for tangent, zero in zip(outs[count:], zeros, strict=True)
        )

    # The rule of a primitive that expands into others takes symbolic zeros.
    symbolic = eqn.params.get("symbolic_zeros", True)
    function = jax.custom_jvp(_primal(current, action))
    marked = in_axes_of_now(*_marked(action, rule))
    function.defjvp(marked, symbolic_zeros=symbolic)
    return list(function(*arrays))


@emits_programs("custom_vjp_call")
def emit_custom_vjp(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    """Emits a `jax.custom_vjp` whose rules are traced, and planned, when JAX asks."""
    (inner,), eqn, context = action.plans, action.eqn, action.context
    outs = len(inner.results)
    takes_zeros = eqn.params.get("symbolic_zeros", False)
    # Its rule asks what is perturbed of what it closes over, which JAX lists among its
    # arguments once it has batched or differentiated it; that of a high-level primitive
    # asks of all. Only symbolic zeros tell, which an eager shard_map does not take.
    varies = [*map(_may_be_perturbed, action.operands)]
    asks = takes_zeros or any(varies[: eqn.params.get("num_consts")])
    symbolic = becomes_a_program() or (asks and may_have_tangents(arrays))
    region, current = context.region, emitter_of(emitter)
    key = _rules_key(emitter, eqn, region)
    rules = emitter.rules.once(key, partial(VjpRules, eqn, region))

    def fwd(*primals: Any) -> tuple[tuple[Any, ...], Any]:
        places = tuple(
            place
            for place in differentiable(eqn)
            if (primals[place].perturbed if symbolic else varies[place])
        )
        forward = _checked(eqn, rules.forward(places))
        rule = _Rule(eqn, forward, _inputs(action), context, inner.result_dtypes)
        taken = [primal.value for primal in primals] if symbolic else primals
        results = rule.run(current(), taken)
        return results[:outs], Partial(pullback_of(places), results[outs:])

    @cache
    def pullback_of(places: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        def pullback(residuals: Sequence[Any], cotangents: Any) -> tuple[Any, Any]:
            zeros = tuple(takes_zeros and _is_zero(ct) for ct in cotangents)
            backward = _checked(eqn, rules.backward(places, zeros))
            arrays = [
                np.zeros(ct.shape, ct.dtype) if _is_zero(ct) else ct
                for ct in cotangents
            ]
            taken = [*residuals, *arrays]
            dtypes = [action.operands[place].dtype for place in places]
            inputs = inputs_like(backward, taken)
            rule = _Rule(eqn, backward, inputs, context, dtypes)
            results = rule.run(current(), taken)
            # Those of other rules are arrays: JAX 0.10 fails on zeros in some loops.
            unneeded = [takes_zeros and zero for zero in zero_results(backward)]
            found = zip(places, results, unneeded, strict=False)
            known = {place: None if zero else ct for place, ct, zero in found}
            gradients = tuple(known.get(place) for place in range(len(action.operands)))
            return gradients, rules.logs(places, zeros, results[len(places) :])

        return pullback

    def bwd(pullback: Any, cotangents: Any) -> Any:
        gradients, logs = pullback(cotangents)
        return (gradients, logs) if LOGS else gradients

    function: Any = jax.custom_vjp(_primal(current, action))
    define = function.defvjp_with_logs if LOGS else function.defvjp
    define(*map(in_axes_of_now, _marked(action, fwd, bwd)), symbolic_zeros=symbolic)
    return list(function(*arrays))


@emits_programs("custom_vmap_call")
def emit_custom_vmap(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (inner,), eqn, context = action.plans, action.eqn, action.context
    current = emitter_of(emitter)

    def rule(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        if not any(batched):
            # JAX asks for this where tangents alone have a batch.
            outs = tuple(current().run(inner, arrays))
            return outs, (False,) * len(outs)
        axes = [0 if b else None for b in batched]
        types: Any = [var.aval for var in eqn.invars]
        avals = [
            jax.typeof(array).update(dtype=aval.dtype, weak_type=aval.weak_type)
            for array, aval in zip(arrays, types, strict=True)
        ]
        out_axes: list[int | None] = []

        def called(*taken: Any) -> Any:
            results = bind(eqn, taken)
            out_axes[:] = [None if only_staged([array]) else 0 for array in results]
            return results

        # Of a result that is not batched `vmap` makes copies, unless it is told so.
        jax.eval_shape(jax.vmap(called, axes, axis_size=size), *avals)
        batched_eqn = jax.vmap(called, axes, [*out_axes], axis_size=size)
        program = make_jaxpr(batched_eqn, context.region)(*avals)
        inputs = inputs_like(program, arrays)
        by_rule = _Rule(eqn, program, inputs, context, inner.result_dtypes)
        outs = by_rule.run(current(), arrays)
        return outs, tuple(axis is not None for axis in out_axes)

    function = jax.custom_batching.custom_vmap(_primal(current, action))
    function.def_vmap(rule)
    return list(function(*arrays))


def _rules_key(emitter: Emitter, eqn: JaxprEqn, *others: Hashable) -> Hashable:
    """What rules have in common that are the same as traced; None if it is unknown."""
    known = rules_of(eqn) if emitter.share else None
    return known and (known, tuple([var.aval for var in eqn.invars]), eqn.ctx, others)


def _marked(action: Structural, *rules: Any) -> tuple[Any, ...]:
    """The rules made for one call, with what they share with those of equal ones."""
    operands = [
        (value.aval, value.dtype, value.traits, _may_be_perturbed(value))
        for value in action.operands
    ]
    # It is held by what the rules close over, so that its id stays taken.
    made_of = id(action.eqn), action.context, tuple(operands)
    for rule in rules:
        setattr(rule, MADE_OF, made_of)
    return rules


def _checked(eqn: JaxprEqn, rule: Any) -> Any:
    """The program of a rule, unless JAX asks too late for it."""
    if any(map(outlived, constants(rule))):
        raise AutocastError(
            f"{location(eqn) or eqn.primitive.name}: a derivative rule of "
            f"{_name(eqn)!r} closes over a value of the function under autocast, and "
            "JAX asks for the rule when that function has run, as it does for "
            "jax.grad(jax.jit(fn)): pass the value to it as an argument, or "
            "differentiate inside, as in jamp.autocast(jax.grad(fn)), whose gradients "
            "may have 16 bits"
        )
    return rule


class _Rule(NamedTuple):
    """A rule as traced, to be planned for some inputs."""

    eqn: JaxprEqn  # the call of the function whose rule it is
    program: Any
    inputs: Values
    context: Context
    dtypes: Sequence[Any]  # in which JAX expects the first of its results

    def run(self, emitter: Emitter, arrays: Arrays) -> tuple[Any, ...]:
        key = cache(self._key)
        run = partial(self._plan_and_run, emitter, key)
        results: tuple[Any, ...] = emitter.call(run, key, arrays)
        return results

    def _plan_and_run(
        self, emitter: Emitter, key: Callable[[], Hashable], *arrays: Any
    ) -> tuple[Any, ...]:
        make = partial(
            plan_program, self.program, self.inputs, self.context, self.dtypes
        )
        plan = emitter.rules.once(key() if emitter.share else None, make)
        made = emitter.run(plan, arrays)
        return tuple(
            convert(array, dtype)
            if (value.eligible or value.dtype == np.float64) and _dtypes.eligible(dtype)
            else array
            for array, value, dtype in zip_longest(made, plan.results, self.dtypes)
        )

    def _key(self) -> Hashable:
        """What it has in common with the rules of equal calls, if that can be told."""
        context = self.context
        known = content_of(self.program, also=_decided_by, custom=self._itself)
        if known is None:
            return None
        if not context.region.policy.scopes:
            context = context._replace(scope=Scope((), context.region))
        inputs = tuple([(value.aval, value.traits) for value in self.inputs])
        return known, inputs, context, tuple(self.dtypes)

    def _itself(self, eqn: JaxprEqn) -> Hashable:
        """What a rule that calls its own function calls; None for other functions.

        As these rules are equal, so are those of what they call.
        """
        if eqn.primitive is not self.eqn.primitive:
            return None
        called, own = map(_called, (eqn, self.eqn))
        return own if called == own else None


def _called(eqn: JaxprEqn) -> Hashable:
    """Where the function that an equation calls was written, and what it computes."""
    program = closed(eqn.params[_primitives.CALLS[eqn.primitive.name]])
    known = content_of(program)
    return known and (program.jaxpr.debug_info.func_src_info, known)


def _decided_by(eqn: JaxprEqn) -> Hashable:
    """What a plan asks of where an equation stands: its regions and functions."""
    key = frame_key(eqn)
    return eqn.source_info.name_stack, key and key[0]


def _inputs(action: Structural) -> list[Value]:
    """Values of a function's inputs inside its rule."""
    operands = [value.handed_over for value in action.operands]
    return [Value(value.aval, value.traits) for value in operands]


def _zero_tangent(tangent: Any, symbolic: bool) -> Any:
    """A tangent that is known to be zero, as JAX takes it of a rule."""
    aval = jax.typeof(tangent)
    if symbolic:
        return SymbolicZero(aval)
    if jax.numpy.issubdtype(aval.dtype, np.inexact):
        return tangent
    return np.zeros(aval.shape, jax.dtypes.float0)


def _may_be_perturbed(value: Value) -> bool:
    return value.array is None or isinstance(value.array, jax.core.Tracer)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _primal(
    current: Callable[[], Emitter], action: Structural
) -> Callable[..., tuple[Any, ...]]:
    (inner,) = action.plans

    def primal(*arrays: Any) -> tuple[Any, ...]:
        return tuple(current().run(inner, arrays))

    primal.__name__ = _name(action.eqn) or primal.__name__
    return primal


def _name(eqn: JaxprEqn) -> str | None:
    """The name of the function that an equation calls."""
    programs = jaxprs_in_params(eqn.params)
    return next((program.debug_info.func_name for program in programs), None)
