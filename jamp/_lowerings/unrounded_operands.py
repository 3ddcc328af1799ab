"""Operands of products, read as they were before they were rounded for them.

On CPUs XLA rounds to 16 bits in a pass of its own, and widens what it gets in another.
A product in float32 needs neither, and one that takes its operands in parts can round
each part when it reads it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jamp._dtypes import FLOAT32, in_dtype
from jamp._lowerings.own_primitives import (
    has_whole_arrays,
    is_argument,
    is_on_cpu,
    is_read,
    made_by,
)

_CONVERT = "stablehlo.convert"


def lower_unrounded(
    product: Primitive,
    is_in_float32: Callable[..., bool],
    rounds_parts: Callable[..., bool],
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    rounded: tuple[int, ...],
    **params: Any,
) -> Any:
    """Lowers a product; one in float32 takes the float32 that its operands were.

    One that rounds part by part takes arguments of the program so, which are there
    anyway, unless what they are rounded to has been read. This depends on what is
    around it, so that JAX can't keep it for others like it.
    """
    taken, avals = [*operands], [*ctx.avals_in]
    on_cpu = bool(rounded) and is_on_cpu(ctx) and has_whole_arrays(ctx)
    pair = avals[:2]
    any_float32 = on_cpu and is_in_float32(*pair, **params)
    for place in rounded if on_cpu else ():
        wide = _before_cast(operands[place], params["dtype"])
        if wide is None:
            continue
        if any_float32 or (
            is_argument(wide)
            and not is_read(operands[place])
            and rounds_parts(place, *pair, **params)
        ):
            taken[place], avals[place] = wide, in_dtype(avals[place], FLOAT32)
    # What is known of operands makes no difference to the product itself.
    program = _program_of(product, avals, {**params, "rounded": ()})
    return _lowered(program, ctx, taken)


def _before_cast(value: Any, dtype: Any) -> Any:
    """The float32 that a value was cast to a dtype from, if so, or then widened again.

    A cast to another dtype is one of the program's own.
    """
    wide, low = ir.F32Type.get(), mlir.dtype_to_ir_type(np.dtype(dtype))
    while (cast := made_by(value, _CONVERT)) is not None:
        (value,) = cast.operands
        if value.type.element_type == wide:
            return value
        if value.type.element_type != low:
            return None
    return None


@lru_cache
def _traced(
    primitive: Primitive,
    avals: tuple[Any, ...],
    params: tuple[tuple[str, Any], ...],
) -> Any:
    bind = partial(primitive.bind, **dict(params))
    return jax.make_jaxpr(bind)(*avals).jaxpr


def _program_of(
    primitive: Primitive, avals: Sequence[Any], params: dict[str, Any]
) -> Any:
    """A program of one equation. To trace it takes longer than to lower it."""
    return _traced(primitive, tuple(avals), tuple(params.items()))


def _lowered(
    program: Any, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """What a program of one equation gives, of the source that is lowered."""
    (eqn,) = program.eqns
    source = eqn.source_info.replace(traceback=None)
    eqn = eqn.replace(source_info=source, ctx=ctx.jaxpr_eqn_ctx)
    results, _ = mlir.jaxpr_subcomp(
        ctx.module_context.replace(
            platforms=ctx.platforms or ctx.module_context.platforms
        ),
        program.replace(eqns=[eqn]),
        ctx.name_stack,
        ctx.tokens_in,
        (),
        *operands,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    return results
