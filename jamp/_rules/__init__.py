"""Rules for equations that need more than a cast of their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jamp._rules.calls import run_jit
from jamp._rules.control_flow import run_cond, run_scan, run_while
from jamp._rules.convert import run_convert
from jamp._rules.derivatives import run_checkpoint, run_custom_jvp, run_custom_vjp
from jamp._rules.plain import run_plain
from jamp._rules.sharding import run_shard_map
from jamp._rules.site import Site
from jamp._values import Value

Handler = Callable[[Site], list[Value]]

# Equations that hold programs, which are rewritten.
STRUCTURAL: Mapping[str, Handler] = {
    "cond": run_cond,
    "custom_jvp_call": run_custom_jvp,
    "custom_vjp_call": run_custom_vjp,
    "jit": run_jit,
    "remat2": run_checkpoint,
    "scan": run_scan,
    "shard_map": run_shard_map,
    "while": run_while,
}


def handler(primitive: str) -> Handler:
    """What runs the equations of a primitive."""
    if primitive == "convert_element_type":
        return run_convert
    return STRUCTURAL.get(primitive, run_plain)
