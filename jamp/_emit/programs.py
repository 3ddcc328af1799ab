"""Calls, shard_map and linear solves, with their programs planned anew."""

from collections.abc import Sequence
from typing import Any

import jax

from jamp import _dtypes
from jamp._emit.emitter import Emitter, emits
from jamp._equations import bind
from jamp._plan.plan import Structural


@emits("jit")
def emit_jit(emitter: Emitter, action: Structural, arrays: list[Any]) -> Sequence[Any]:
    """Emits a jitted function."""
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
def emit_cond(emitter: Emitter, action: Structural, arrays: list[Any]) -> Sequence[Any]:
    """Emits a conditional or switch, whose branches return the same dtypes."""
    branches = tuple(
        emitter.closed(plan, arrays[1:], into=action.dtypes) for plan in action.plans
    )
    return bind(action.eqn, arrays, branches=branches)


@emits("remat2")
def emit_checkpoint(
    emitter: Emitter, action: Structural, arrays: list[Any]
) -> Sequence[Any]:
    """Emits a checkpointed function, with its policy."""
    params, (plan,) = action.eqn.params, action.plans
    function = jax.checkpoint(
        lambda *arrays: emitter.run(plan, arrays),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    results: list[Any] = function(*arrays)
    return results


@emits("shard_map")
def emit_shard_map(
    emitter: Emitter, action: Structural, arrays: list[Any]
) -> Sequence[Any]:
    """Emits a shard_map; its body is run anew, because it stands on manual axes."""
    params, (plan,) = action.eqn.params, action.plans
    function: Any = jax.shard_map(
        lambda *shards: tuple(emitter.run(plan, shards)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    results: tuple[Any, ...] = function(*arrays)
    return results


@emits("custom_linear_solve")
def emit_linear_solve(
    emitter: Emitter, action: Structural, arrays: list[Any]
) -> Sequence[Any]:
    """Emits a linear solve, whose programs return what they did as traced."""
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
