"""Equations that hold programs, with these planned anew.

The carry of a loop keeps the dtypes at which it has settled. What a rule of the user's
for derivatives or batching does is known only when JAX asks for it, when the function
is differentiated or batched. It is traced then, as written, through JAX's own
transformation, and the program that results is planned and run under the policy of the
function. This is the only place where something is planned while a plan runs.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice, zip_longest
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.tree_util import Partial

from jamp import _dtypes
from jamp._compat import scan_counts
from jamp._emit.emitter import Arrays, Emitter, convert, convert_all, emit, emits
from jamp._equations import bind, constants
from jamp._errors import AutocastError
from jamp._plan.derivative_rules import (
    VjpRules,
    differentiable,
    trace_jvp,
    zero_results,
)
from jamp._plan.plan import Plan, Structural
from jamp._plan.planner import plan_for, plan_program
from jamp._plan.values import Value
from jamp._tracing.casts import make_jaxpr
from jamp._tracing.origin import location
from jamp._tracing.trace import outlived


@emits("jit")
def emit_jit(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    params, slots = action.eqn.params, action.slots
    # Every parameter that holds an entry per input needs one for the casts too.
    shardings, layouts = (
        (*params[name], *(params[name][slot] for slot in slots))
        for name in ("in_shardings", "in_layouts")
    )
    return bind(
        action.eqn,
        arrays,
        jaxpr=emitter.closed(action.plans[0], arrays),
        in_shardings=shardings,
        in_layouts=layouts,
        donated_invars=(*params["donated_invars"], *(False for _ in slots)),
    )


@emits("cond")
def emit_cond(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    branches = tuple(
        emitter.closed(plan, arrays[1:], into=action.dtypes) for plan in action.plans
    )
    return bind(action.eqn, arrays, branches=branches)


@emits("remat2")
def emit_checkpoint(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    params, (plan,) = action.eqn.params, action.plans
    function = jax.checkpoint(
        lambda *arrays: emitter.run(plan, arrays),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return list(function(*arrays))


@emits("shard_map")
def emit_shard_map(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    params, (plan,) = action.eqn.params, action.plans
    function: Any = jax.shard_map(
        lambda *shards: tuple(emitter.run(plan, shards)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(function(*arrays))


@emits("all_gather")
@emits("all_gather_invariant")
def emit_all_gather(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    return [_gathered(action.eqn, arrays[0])]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(eqn: JaxprEqn, array: Any) -> Any:
    """What devices gather in 16 bits, and add up the gradients of in float32."""
    return bind(eqn, [array])[0]


@_gathered.defjvp
def _gathered_jvp(eqn: JaxprEqn, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (tangent,) = bind(eqn, [convert(tangents[0], _dtypes.FLOAT32)])
    return _gathered(eqn, *primals), convert(tangent, primals[0].dtype)


@emits("custom_linear_solve")
def emit_linear_solve(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    programs, lengths = (action.eqn.params[n] for n in ("jaxprs", "const_lengths"))
    plans, consts = iter(action.plans), iter(arrays)
    sides = arrays[sum(lengths) :]

    def rewritten(program: Any, length: int) -> Any:
        taken = [*islice(consts, length), *sides]
        if program is None:
            return None
        dtypes = [_dtypes.dtype_of(var) for var in program.jaxpr.outvars]
        return emitter.closed(next(plans), taken, into=dtypes)

    solvers = type(programs)(*map(rewritten, programs, lengths))
    return bind(action.eqn, arrays, jaxprs=solvers)


@jax.custom_jvp
def _narrowed(wide: Any, narrow: Any) -> Any:
    """A cast made elsewhere, of which every use has a gradient of its own in float32.

    Outside a loop a cast is one value, and JAX would sum its gradients over all
    iterations in its own dtype. Seen from here each use is a cast of `wide`.
    """
    del wide
    return narrow


@_narrowed.defjvp
def _narrowed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    wide, narrow = primals
    # Through itself again, so that it has second derivatives.
    primal = _narrowed(wide, narrow)
    return primal, lax.convert_element_type(tangents[0], narrow.dtype)


@emits("scan")
def emit_scan(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    params, slots, (plan,) = action.eqn.params, action.slots, action.plans
    count, num_carry = scan_counts(params)
    end = len(arrays) - len(slots)
    # What is perturbed of arrays in 16 bits is wide, for their gradients to add up.
    wide = [
        array
        if action.context.linear or not _dtypes.narrow(array.dtype)
        else convert(array, _dtypes.FLOAT32)
        for array in arrays[:count]
    ]
    narrow = list(map(lax.stop_gradient, [*arrays[:count], *arrays[end:]]))

    def step(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        sources = [*wide, *(wide[slot] for slot in slots)]
        shared = [
            array if array.dtype == own.dtype else _narrowed(array, own)
            for array, own in zip(sources, narrow, strict=True)
        ]
        taken = [*shared[:count], *carried, *slices, *shared[count:]]
        results = emitter.run(plan, taken)
        carried = convert_all(results[:num_carry], action.dtypes[:num_carry])
        return carried, results[num_carry:]

    final, stacked = lax.scan(
        step,
        arrays[count : count + num_carry],
        arrays[count + num_carry : end],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*final, *stacked]


@emits("while")
def emit_while(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    params, (test, plan) = action.eqn.params, action.plans
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    end = len(arrays) - len(action.slots)
    tested, consts = arrays[:num_cond], arrays[num_cond:][:num_body]
    carry, extras = arrays[num_cond + num_body : end], arrays[end:]
    shared = [*consts, *extras]

    def step(*arrays: Any) -> list[Any]:
        consts, rest = arrays[:num_body], arrays[num_body:]
        extras, carried = rest[: len(action.slots)], rest[len(action.slots) :]
        results = emitter.run(plan, [*consts, *carried, *extras])
        return convert_all(results, action.dtypes)

    if test.results[0].ndim > 0:
        # Only the primitive takes the loops over several predicates that vmap makes.
        return bind(
            action.eqn,
            [*tested, *shared, *carry],
            cond_jaxpr=emitter.closed(test, [*tested, *carry]),
            body_jaxpr=jax.make_jaxpr(step)(*shared, *carry),
            body_nconsts=len(shared),
        )
    final: list[Any] = lax.while_loop(
        lambda carried: emitter.run(test, [*tested, *carried])[0],
        lambda carried: step(*shared, *carried),
        list(carry),
    )
    return final


@emits("custom_jvp_call")
def emit_custom_jvp(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    (inner,), eqn = action.plans, action.eqn
    count = len(inner.results)

    def rule(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        slots = [s for s in differentiable(eqn) if not _is_zero(tangents[s])]
        taken = [tangents[slot] for slot in slots]
        program = _checked(eqn, trace_jvp(eqn, action.context.region, slots))
        # JAX may transpose what computes the tangents.
        context = action.context._replace(linear=True)
        values = [*_inputs(action), *map(Value, map(jax.typeof, taken))]
        plan = plan_program(program, values, context)
        outs = _run_rule(plan, [*primals, *taken], inner.dtypes * 2)
        zeros = zero_results(program)[count:]
        return outs[:count], tuple(
            SymbolicZero(jax.typeof(tangent)) if zero else tangent
            for tangent, zero in zip(outs[count:], zeros, strict=True)
        )

    function = jax.custom_jvp(_primal(emitter, action))
    # The rule of a primitive that expands into others takes symbolic zeros.
    function.defjvp(rule, symbolic_zeros=eqn.params.get("symbolic_zeros", True))
    return list(function(*arrays))


@emits("custom_vjp_call")
def emit_custom_vjp(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    (inner,), eqn, context = action.plans, action.eqn, action.context
    outs = len(inner.results)
    takes_zeros = eqn.params.get("symbolic_zeros", False)
    rules = VjpRules(eqn, context.region)

    def fwd(*primals: Any) -> tuple[tuple[Any, ...], Any]:
        slots = tuple(s for s in differentiable(eqn) if primals[s].perturbed)
        forward = _checked(eqn, rules.forward(slots))
        plan = plan_program(forward, _inputs(action), context)
        results = _run_rule(plan, [primal.value for primal in primals], inner.dtypes)
        return results[:outs], Partial(pullback_of(slots), results[outs:])

    @cache
    def pullback_of(slots: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
        def pullback(residuals: Sequence[Any], cotangents: Any) -> tuple[Any, ...]:
            zeros = tuple(takes_zeros and _is_zero(ct) for ct in cotangents)
            backward = _checked(eqn, rules.backward(slots, zeros))
            arrays = [
                np.zeros(ct.shape, ct.dtype) if _is_zero(ct) else ct
                for ct in cotangents
            ]
            taken = [*residuals, *arrays]
            dtypes = [action.operands[slot].dtype for slot in slots]
            gradients = _run_rule(plan_for(backward, taken, context), taken, dtypes)
            # Those of other rules are arrays: JAX 0.10 fails on zeros in some loops.
            symbolic = [takes_zeros and zero for zero in zero_results(backward)]
            found = zip(slots, gradients, symbolic, strict=True)
            known = {slot: None if zero else ct for slot, ct, zero in found}
            return tuple(known.get(slot) for slot in range(len(action.operands)))

        return pullback

    def bwd(pullback: Any, cotangents: Any) -> Any:
        return pullback(cotangents)

    function = jax.custom_vjp(_primal(emitter, action))
    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return list(function(*arrays))


@emits("custom_vmap_call")
def emit_custom_vmap(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    (inner,), eqn, context = action.plans, action.eqn, action.context

    def rule(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        axes = [0 if b else None for b in batched]
        avals = [
            jax.ShapeDtypeStruct(array.shape, _dtypes.dtype_of(var))
            for array, var in zip(arrays, eqn.invars, strict=True)
        ]
        by_rule = jax.vmap(lambda *taken: bind(eqn, taken), axes, axis_size=size)
        program = make_jaxpr(by_rule, context.region)(*avals)
        outs = _run_rule(plan_for(program, arrays, context), arrays, inner.dtypes)
        return outs, (True,) * len(outs)

    function = jax.custom_batching.custom_vmap(_primal(emitter, action))
    function.def_vmap(rule)
    return list(function(*arrays))


def _checked(eqn: JaxprEqn, rule: Any) -> Any:
    """The program of a rule, unless JAX asks too late for it."""
    if any(map(outlived, constants(rule))):
        raise AutocastError(
            f"{location(eqn) or eqn.primitive.name}: a derivative rule of "
            f"{_name(eqn)!r} closes over a value of the function under autocast, and "
            "JAX asks for the rule when that function has run, as it does under "
            "jax.jit: pass the value to it as an argument, or differentiate inside, as "
            "in jamp.autocast(jax.grad(fn))"
        )
    return rule


def _run_rule(plan: Plan, arrays: Arrays, dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """Results of a rule, the first of them in the dtypes that JAX expects of it."""
    results = zip_longest(emit(plan, arrays), plan.results, dtypes)
    return tuple(
        convert(array, dtype) if value.eligible and _dtypes.eligible(dtype) else array
        for array, value, dtype in results
    )


def _inputs(action: Structural) -> list[Value]:
    """Values of a function's inputs inside its rule."""
    return [Value(value.aval, value.traits) for value in action.operands]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _primal(emitter: Emitter, action: Structural) -> Callable[..., tuple[Any, ...]]:
    (inner,) = action.plans

    def primal(*arrays: Any) -> tuple[Any, ...]:
        return tuple(emitter.run(inner, arrays))

    primal.__name__ = _name(action.eqn) or primal.__name__
    return primal


def _name(eqn: JaxprEqn) -> str | None:
    """The name of the function that an equation calls."""
    programs = jaxprs_in_params(eqn.params)
    return next((program.debug_info.func_name for program in programs), None)
