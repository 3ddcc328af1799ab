"""Equations that hold programs, with these as planned.

The carry of a loop keeps the dtypes at which it has settled.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._compat import is_plain_array, scan_counts
from jamp._emit.before_loops import Split, differentiated_as, split
from jamp._emit.conversions import convert, convert_all
from jamp._emit.emitter import Arrays, Emitter, Places, emits_programs, emitter_of
from jamp._emit.loop_stacks import stackable, stacks_in_float32
from jamp._equations import bind, checkpointed
from jamp._plan.plan import Plan, Structural


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


@emits_programs("all_gather")
@emits_programs("all_gather_invariant")
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


def _dtype_of(array: Any) -> Any:
    """Its dtype; None of a reference, and of what else is no array."""
    aval = jax.typeof(array)
    return aval.dtype if is_plain_array(aval) else None


@emits_programs("scan")
def emit_scan(
    emitter: Emitter, action: Structural, arrays: Arrays, varying: Places
) -> Arrays:
    (plan,), parts = action.plans, split(action)
    if parts is None:
        return _scan(emitter, action, plan, arrays)
    if parts.always:
        return _scan_of_made(emitter, action, parts, arrays)
    current = emitter_of(emitter)

    def rule(*arrays: Any) -> Arrays:
        return _scan_of_made(current(), action, parts, arrays)

    function = differentiated_as(
        lambda *arrays: _scan(current(), action, plan, arrays), rule, id(action)
    )
    return list(function(*arrays))


def _scan_of_made(
    emitter: Emitter, action: Structural, parts: Split, arrays: Arrays
) -> Arrays:
    """A scan some products of which are made before it."""
    count, num_carry = scan_counts(action.eqn.params)
    taken, _ = action.unshared(arrays)
    end = len(taken) - len(action.slots)
    sliced = taken[count + num_carry : end]
    made = parts.stacked(emitter.run, taken[:count], sliced, taken[end:])
    return _scan(emitter, action, parts.within, arrays, made)


def _scan(
    emitter: Emitter,
    action: Structural,
    plan: Plan,
    arrays: Arrays,
    made: Sequence[Any] = (),
) -> Arrays:
    """A scan of a plan, which may take more slices than the equation has."""
    params, slots = action.eqn.params, action.slots
    count, num_carry = scan_counts(params)
    arrays, casts = action.unshared(arrays)
    end = len(arrays) - len(slots)
    # What is perturbed of arrays in 16 bits is wide, for their gradients to add up.
    wide = [
        array
        if action.context.transposable or not _dtypes.below_float32(_dtype_of(array))
        else convert(casts.get(place, array), _dtypes.FLOAT32)
        for place, array in enumerate(arrays[:count])
    ]
    sliced = {place: cast for place, cast in casts.items() if place >= count}
    narrow = [
        array if _dtype_of(array) is None else lax.stop_gradient(array)
        for array in (*arrays[:count], *arrays[end:])
    ]
    in_float32 = stacks_in_float32(action)
    made = stackable(made) if in_float32 else made
    sliced_or_carried = range(count, end + len(made)) if in_float32 else ()

    def step(carried: Sequence[Any], given: tuple[Any, ...]) -> tuple[Any, Any]:
        slices, made, wides = given
        made = convert_all(made, [value.dtype for value in plan.inputs[end:]])
        sources = [*wide, *(wide[slot] for slot in slots)]
        shared = [
            array if _dtype_of(array) == _dtype_of(own) else _narrowed(array, own)
            for array, own in zip(sources, narrow, strict=True)
        ]
        taken = [*shared[:count], *carried, *slices, *made, *shared[count:]]
        pairs = enumerate(zip(taken[:count], wide, strict=True))
        others = {p: w for p, (own, w) in pairs if _dtype_of(own) != _dtype_of(w)}
        others.update(zip(sliced, wides, strict=True))
        results = emitter.run(plan, taken, sliced_or_carried, others)
        carried = convert_all(results[:num_carry], action.result_dtypes[:num_carry])
        left = results[num_carry:]
        return carried, stackable(left) if in_float32 else left

    final, stacked = lax.scan(
        step,
        [*arrays[count : count + num_carry]],
        (arrays[count + num_carry : end], made, [*sliced.values()]),
        # It may be symbolic, which only slices may have.
        length=None if end > count + num_carry else params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*final, *convert_all(stacked, action.result_dtypes[num_carry:])]


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
