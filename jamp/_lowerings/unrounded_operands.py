"""Operands of products in float32, read as they were before they were rounded for them.

On CPUs XLA rounds to 16 bits in a pass of its own, and widens what it gets in another.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jamp._dtypes import FLOAT32, in_dtype
from jamp._lowerings.own_primitives import (
    has_whole_arrays,
    is_on_cpu,
    lowered,
    program_of,
)

_CONVERT = "stablehlo.convert"


def lower_unrounded(
    product: Primitive,
    is_in_float32: Callable[..., bool],
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    rounded: tuple[int, ...],
    **params: Any,
) -> Any:
    """Lowers a product; one in float32 takes the float32 that its operands were.

    This depends on what is around it, so that JAX can't keep it for others like it.
    """
    taken, avals = [*operands], [*ctx.avals_in]
    on_cpu = is_on_cpu(ctx) and has_whole_arrays(ctx)
    as_they_were = on_cpu and is_in_float32(*avals[:2], **params)
    for place in rounded if as_they_were else ():
        wide = _before_cast(operands[place])
        if wide is not None:
            taken[place], avals[place] = wide, in_dtype(avals[place], FLOAT32)
    # What is known of operands makes no difference to the product itself.
    return lowered(program_of(product, avals, {**params, "rounded": ()}), ctx, taken)


def _before_cast(value: Any) -> Any:
    """The float32 that a value was cast from, if it is a cast."""
    if not isinstance(value, ir.OpResult) or value.owner.name != _CONVERT:
        return None
    (wide,) = value.owner.operands
    return wide if wide.type.element_type == ir.F32Type.get() else None
