"""Weights that are reversed, and cast for a convolution: off CPUs, cast first.

A convolution of a window in reverse is the gradient of another's pictures, for which
cuDNN has an algorithm of its own. XLA takes it if the window is reversed right before;
otherwise it convolves with all the zeros that a stride left between the pixels.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jamp._lowerings.own_primitives import is_on_cpu, made_by

_CONVERT = "stablehlo.convert"
_REVERSE, _TRANSPOSE = "stablehlo.reverse", "stablehlo.transpose"


def lower_reversed(
    lower: Callable[..., Any],
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    **params: Any,
) -> Any:
    """Lowers a product; of what is reversed, and then cast for it, the cast is first.

    This depends on what made the operands: JAX can't keep it for others like it.
    """
    if not is_on_cpu(ctx):
        operands = (*map(_cast_before, operands[:2]), *operands[2:])
    return lower(ctx, *operands, **params)


def _cast_before(value: Any) -> Any:
    """A cast of reversed weights, as reversed casts of them."""
    cast = made_by(value, _CONVERT)
    if cast is None:
        return value
    moves, wide = list[Any](), cast.operands[0]
    while (move := made_by(wide, _REVERSE, _TRANSPOSE)) is not None:
        moves.append(move)
        wide = move.operands[0]
    if not any(move.name == _REVERSE for move in moves):
        return value
    low = ir.RankedTensorType.get(wide.type.shape, value.type.element_type)
    result = hlo.convert(low, wide)
    for move in reversed(moves):
        if move.name == _REVERSE:
            result = hlo.reverse(result, move.attributes["dimensions"])
        else:
            result = hlo.transpose(result, move.attributes["permutation"])
    return result
