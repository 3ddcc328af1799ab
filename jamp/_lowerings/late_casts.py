"""Casts of weights that XLA makes when they are multiplied, not before.

On CPUs it casts the weights of all layers before it runs the first, and keeps what it
gets: in inference, copies of all weights. A weight behind a barrier with the other
operand of its product is cast when that is there. Where the cast is wanted again, as in
a loop or in a backward pass, it stays where it is.
"""

from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

Value = ir.Value[Any]

_TRANSPOSE = "stablehlo.transpose"
_CASTS = {"stablehlo.convert", "stablehlo.optimization_barrier", _TRANSPOSE}


def lower_late(
    product: Primitive,
    ctx: mlir.LoweringRuleContext,
    *operands: Value,
    weights: tuple[int, ...],
    **params: Any,
) -> Any:
    """Lowers a product whose result is not differentiated.

    This depends on what is around it, so that JAX can't keep it for others like it.
    """
    taken, avals = [*operands], [*ctx.avals_in]
    # With two weights, a product is the first of all, and their casts are with it.
    if len(weights) == 1 and _on_one_cpu(ctx):
        (place,) = weights
        transpose = _transpose_before(operands[2])
        argument = transpose.operands[0] if transpose else operands[2]
        if _is_first_cast(operands[place], argument):
            pair = [operands[1 - place], argument]
            taken[1 - place], weight = hlo.OptimizationBarrierOp(pair).results
            if transpose:
                order = transpose.attributes["permutation"]
                weight = hlo.TransposeOp(weight, order).result
            taken[place] = taken[2] = weight
            avals[place] = avals[2]
    bind = partial(product.bind, weights=weights, **params)
    lowered = mlir.lower_fun(bind, multiple_results=False)
    return lowered(ctx.replace(avals_in=avals), *taken)


def _on_one_cpu(ctx: mlir.LoweringRuleContext) -> bool:
    axes = ctx.module_context.axis_context
    one = isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1
    return one and tuple(ctx.module_context.platforms) == ("cpu",)


def _transpose_before(value: Value) -> Any:
    """The operation that made a value, if it is a transpose."""
    if isinstance(value, ir.OpResult) and value.owner.name == _TRANSPOSE:
        return value.owner
    return None


def _is_first_cast(cast: Value, argument: Value) -> bool:
    """Whether nothing else, so far, has cast an argument of the whole program.

    It may be cast again later: then it is cast twice, and no more than that.
    """
    if not (isinstance(argument, ir.BlockArgument) and isinstance(cast, ir.OpResult)):
        return False
    # Any other function or block may be the body of a loop.
    around = argument.owner.owner
    if not (isinstance(around, func.FuncOp) and around.sym_name.value == "main"):
        return False
    users = [use.owner.operation.name for use in argument.uses]
    return sum(user in _CASTS for user in users) == 1 and not list(cast.uses)
