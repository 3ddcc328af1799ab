"""Rules for equations that need more than a cast of their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jamp._rules.calls import run_call, run_jit
from jamp._rules.control_flow import run_cond, run_scan, run_while
from jamp._rules.convert import run_convert
from jamp._rules.derivatives import (
    run_checkpoint,
    run_custom_jvp,
    run_custom_vjp,
    run_custom_vmap,
    run_hi_primitive,
)
from jamp._rules.plain import run_plain
from jamp._rules.sharding import run_shard_map
from jamp._rules.site import Site
from jamp._rules.solves import run_linear_solve
from jamp._values import Value

Handler = Callable[[Site], list[Value]]

# Equations that hold programs, which are rewritten.
STRUCTURAL: Mapping[str, Handler] = {
    "call": run_call,
    "call_hi_primitive": run_hi_primitive,
    "closed_call": run_call,
    "cond": run_cond,
    "custom_jvp_call": run_custom_jvp,
    "custom_linear_solve": run_linear_solve,
    "custom_vjp_call": run_custom_vjp,
    "custom_vmap_call": run_custom_vmap,
    "eval_jaxpr": run_call,
    "jit": run_jit,
    "remat2": run_checkpoint,
    "remat_opt": run_call,
    "scan": run_scan,
    "shard_map": run_shard_map,
    "while": run_while,
}


def handler(primitive: str) -> Handler:
    """What runs the equations of a primitive."""
    if primitive == "convert_element_type":
        return run_convert
    return STRUCTURAL.get(primitive, run_plain)
