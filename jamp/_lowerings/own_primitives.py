"""Primitives of jamp's own that are named like one of JAX's, and differ on CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

Operation = Callable[..., Any]


def like(known: Primitive, abstract_eval: Operation) -> Primitive:
    """A primitive with the name of one of JAX's, and without other rules than this."""
    primitive = Primitive(known.name)
    primitive.multiple_results = known.multiple_results
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    return primitive


def lower(
    primitive: Primitive,
    run: Operation,
    run_on_cpu: Operation,
    run_on_one_cpu: Operation | None = None,
) -> None:
    """Registers what a primitive is, in JAX's operations.

    Args:
      primitive: the primitive.
      run: what it is.
      run_on_cpu: the same on CPUs.
      run_on_one_cpu: the same where arrays are not spread over several devices.
    """
    several = run, run_on_cpu, run_on_one_cpu or run_on_cpu
    everywhere, on_cpu, on_one_cpu = (
        mlir.lower_fun(one, multiple_results=primitive.multiple_results)
        for one in several
    )

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        lowered = on_one_cpu if has_whole_arrays(ctx) else on_cpu
        return lowered(ctx, *operands, **params)

    mlir.register_lowering(primitive, everywhere)
    mlir.register_lowering(primitive, rule, platform="cpu")


def is_for_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


def has_whole_arrays(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether arrays are on one device, as are the parts that `shard_map` gives.

    Those with shardings in their types count as spread: JAX has to be told how what is
    made of them is.
    """
    aval: Any = ctx.avals_in[0]
    mesh = aval.sharding.mesh
    if mesh.empty:
        return is_for_one_device(ctx)
    manual: bool = mesh.are_all_axes_manual
    return manual or (is_for_one_device(ctx) and not mesh.explicit_axes)
