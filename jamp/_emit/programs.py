"""Equations that hold programs, with these planned anew.

The carry of a loop keeps the dtypes at which it has settled.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jamp import _dtypes
from jamp._compat import scan_counts
from jamp._emit.conversion import convert_all
from jamp._emit.emitter import Arrays, Emitter, emits
from jamp._equations import bind
from jamp._plan.plan import Structural


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


@emits("custom_linear_solve")
def emit_linear_solve(emitter: Emitter, action: Structural, arrays: Arrays) -> Arrays:
    programs, lengths = (action.eqn.params[n] for n in ("jaxprs", "const_lengths"))
    plans, consts = iter(action.plans), iter(arrays)
    sides = arrays[sum(lengths) :]
    rewritten: list[Any] = []
    for program, length in zip(programs, lengths, strict=True):
        taken = [*(next(consts) for _ in range(length)), *sides]
        if program is None:
            rewritten.append(None)
            continue
        dtypes = [_dtypes.dtype_of(var) for var in program.jaxpr.outvars]
        rewritten.append(emitter.closed(next(plans), taken, into=dtypes))
    return bind(action.eqn, arrays, jaxprs=type(programs)(*rewritten))


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
    shared, extras = arrays[:count], list(map(lax.stop_gradient, arrays[end:]))

    def step(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        casts = [
            _narrowed(shared[slot], extra)
            for slot, extra in zip(slots, extras, strict=True)
        ]
        results = emitter.run(plan, [*shared, *carried, *slices, *casts])
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
        # `vmap` makes loops that run while any of several predicates holds. Only the
        # primitive takes them.
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
