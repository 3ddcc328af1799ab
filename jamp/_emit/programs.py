"""Equations that hold programs, with these as planned."""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._emit.conversions import convert, convert_all
from jamp._emit.emitter import Arrays, Emitter, Places, emits_programs
from jamp._equations.binding import bind, checkpointed
from jamp._plan.plan import Structural


@emits_programs("jit")
def emit_jit(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    params, (plan,) = action.eqn.params, action.plans
    taken, wide = action.unshared(arrays)
    # The casts that are shared come last, and are no inputs of the plan.
    varying = [place for place in varying if place < len(taken)]
    # Every parameter that holds an entry per input needs one for the casts too.
    casts = *action.slots, *action.shared
    shardings, layouts = (
        (*params[name], *(params[name][place] for place in casts))
        for name in ("in_shardings", "in_layouts")
    )
    return bind(
        action.eqn,
        arrays,
        jaxpr=emitter.closed(plan, taken, varying=varying, wide=wide),
        in_shardings=shardings,
        in_layouts=layouts,
        donated_invars=(*params["donated_invars"], *(False for _ in casts)),
    )


@emits_programs("cond")
def emit_cond(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (_, *taken), wide = action.unshared(arrays)
    wide = {place - 1: array for place, array in wide.items()}
    # Of what a branch takes JAX saves everything for each iteration.
    varying = range(len(taken)) if varying else ()
    branches = tuple(
        emitter.closed(
            plan, taken, into=action.result_dtypes, varying=varying, wide=wide
        )
        for plan in action.plans
    )
    return bind(action.eqn, arrays, branches=branches)


@emits_programs("remat2")
def emit_checkpoint(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (plan,), (taken, wide) = action.plans, action.unshared(arrays)
    dtypes = [value.dtype for value in plan.arguments]
    if action.eqn.params["differentiated"]:
        taken = convert_all(taken, dtypes)
    # Bound as the primitive that it is: `jax.checkpoint` would not know that it stands
    # in a backward pass, and XLA would take it for what the forward pass has computed.
    program = emitter.closed(plan, taken, wide=wide)
    if not program.consts:
        return bind(action.eqn, [*taken, *wide.values()], jaxpr=program.jaxpr)

    def run(arrays: Arrays, wide: Mapping[int, Any]) -> list[Any]:
        return emitter.run(plan, convert_all(arrays, dtypes), wide=wide)

    options = {name: action.eqn.params[name] for name in ("prevent_cse", "policy")}
    return list(checkpointed(run, **options)(taken, wide))


@emits_programs("shard_map")
def emit_shard_map(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    params, (plan,) = action.eqn.params, action.plans
    specs = params["in_specs"]

    def run(*shards: Any) -> tuple[Any, ...]:
        taken, wide = action.unshared(shards)
        return tuple(emitter.run(plan, taken, wide=wide))

    function: Any = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(*specs, *(specs[place] for place in action.shared)),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(function(*arrays))


@emits_programs("all_gather", "all_gather_invariant")
def emit_all_gather(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    return [_gathered(action.eqn, arrays[0])]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(eqn: JaxprEqn, array: Any) -> Any:
    """What devices gather in 16 bits, and add up the gradients of in float32."""
    return bind(eqn, [array])[0]


@_gathered.defjvp
def _gathered_jvp(eqn: JaxprEqn, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (tangent,) = bind(eqn, [convert(tangents[0], _dtypes.FLOAT32)])
    return _gathered(eqn, *primals), convert(tangent, primals[0].dtype)


@emits_programs("custom_linear_solve")
def emit_linear_solve(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
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


@emits_programs("while")
def emit_while(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
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
        return convert_all(results, action.result_dtypes)

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
