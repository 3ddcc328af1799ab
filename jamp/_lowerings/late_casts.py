"""Casts of weights that XLA makes when they are multiplied, not before.

On CPUs it casts the weights of all layers before it runs the first, and keeps what it
gets: in inference, copies of all weights. A weight behind a barrier with the other
operand of its product is cast when that is there. Where XLA drops barriers, it is cast
in one of two equal branches, which one the other operand decides. Where the cast is
wanted again, as in a loop or in a backward pass, it stays where it is. A product of few
rows may read the weight as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jamp._lowerings.own_primitives import (
    has_whole_arrays,
    is_argument,
    is_for_one_device,
    is_on_cpu,
    is_read,
    made_by,
)
from jamp._lowerings.releases import KEEPS_BARRIERS

Value = ir.Value[Any]

_BARRIER, _BRANCHES = "stablehlo.optimization_barrier", "stablehlo.if"
_CASE = "stablehlo.case"
_TRANSPOSE = "stablehlo.transpose"
_OURS, _MARK = "mhlo.frontend_attributes", "late_cast"
# What reads an argument to cast it.
_READERS = {"stablehlo.convert", _BARRIER, _BRANCHES, _CASE, _TRANSPOSE}
# Users of an argument that are looked at: it may have thousands.
_MOST_USERS = 16
# A weight waits for no operand so many times as large: its copy takes little memory
# beside that, which could not be computed together with what reads it.
_MUCH_LARGER = 16


def lower_with_weights(
    lower: Callable[..., Any],
    differentiated: bool,
    reads_as_is: Callable[..., bool],
    ctx: mlir.LoweringRuleContext,
    *operands: Value,
    weights: tuple[int, ...],
    **params: Any,
) -> Any:
    """Lowers a product of which some operands are casts of weights.

    This depends on what is around it, so that JAX can't keep it for others like it.
    """
    taken, avals = [*operands], [*ctx.avals_in]
    # Of some weights no other product is known.
    alone = []
    for place in weights if _on_one_cpu(ctx) else ():
        weight = operands[2 + weights.index(place)]
        users = _users(operands[place], _argument(weight))
        if _have_one_cast(users) and not differentiated:
            alone.append(place)
        # So that this product and one before can be one, and a weight is cast once.
        for late in filter(_is_ours, users):
            _loosen(late)
    params["weights"] = weights
    read = [at for at in alone if reads_as_is(at, *ctx.avals_in[:2], **params)]
    if read and has_whole_arrays(ctx):
        return _as_is_or_cast(lower, ctx, operands, read, params)
    # With two weights, both operands are there from the beginning.
    if alone and len(weights) == 1 and _takes_memory(weights[0], ctx.avals_in):
        (place,) = weights
        other, weight = operands[1 - place], operands[2]
        if KEEPS_BARRIERS:
            taken[1 - place], weight = _tied(other, weight)
            # The product casts it.
            taken[place] = taken[2] = weight
            avals[place] = avals[2]
        else:
            taken[place] = _cast_after(other, weight, operands[place])
    return lower(ctx.replace(avals_in=avals), *taken, **params)


def _takes_memory(place: int, avals: Sequence[Any]) -> bool:
    """Whether a copy of a weight takes memory beside the other operand."""
    return bool(_MUCH_LARGER * avals[place].size >= avals[1 - place].size)


def _as_is_or_cast(
    lower: Callable[..., Any],
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Value],
    read: Sequence[int],
    params: dict[str, Any],
) -> Any:
    """A product that reads weights as they are, and beside it one that casts them.

    The second is the branch that is never taken, until another product is found.
    """
    wide, avals, low = [*operands], [*ctx.avals_in], [*operands]
    weights = params["weights"]
    for place in read:
        at = 2 + weights.index(place)
        wide[place], avals[place] = operands[at], avals[at]
    first = mlir.ir_constant(np.int32(0))
    (out,) = ctx.avals_out
    made = ir.RankedTensorType.get(out.shape, mlir.dtype_to_ir_type(out.dtype))
    branches = hlo.CaseOp([made], first, 2)
    _mark(branches.operation)
    with ir.InsertionPoint(branches.regions[0].blocks.append()):
        hlo.return_(lower(ctx.replace(avals_in=avals), *wide, **params))
    with ir.InsertionPoint(branches.regions[1].blocks.append()):
        for place in read:
            weight = operands[2 + weights.index(place)]
            low[place] = _cast_again(weight, operands[place])
        hlo.return_(lower(ctx, *low, **params))
    # JAX keeps what this returns, and the branches may go.
    return [hlo.ConvertOp(made, branches.results[0]).result]


def _on_one_cpu(ctx: mlir.LoweringRuleContext) -> bool:
    module = ctx.module_context
    # An exported program may be called in a loop.
    exported = module.lowering_parameters.for_export
    return is_on_cpu(ctx) and is_for_one_device(ctx) and not exported


def _argument(weight: Value) -> Value:
    transpose = made_by(weight, _TRANSPOSE)
    return transpose.operands[0] if transpose else weight


def _users(cast: Value, argument: Value) -> list[ir.Operation]:
    """Users of an argument of the whole program, if nothing has read this cast yet."""
    if is_read(cast):
        return []
    if not (is_argument(argument) and isinstance(cast, ir.OpResult)):
        return []
    users: dict[ir.Operation, None] = {}
    for use in argument.uses:
        # Each branch has a cast.
        users[_around(use.owner.operation)] = None
        if len(users) == _MOST_USERS:
            break
    return list(users)


def _around(user: ir.Operation) -> ir.Operation:
    parent = user.parent
    return parent if parent is not None and _is_ours(parent) else user


def _have_one_cast(users: list[ir.Operation]) -> bool:
    """Whether these are all users of an argument, and one of them casts it."""
    readers = [user for user in users if user.name in _READERS]
    return len(readers) == 1 and len(users) < _MOST_USERS


def _tied(other: Value, weight: Value) -> tuple[Value, Value]:
    """An operand and a weight that is there when the operand is."""
    transpose = made_by(weight, _TRANSPOSE)
    barrier = hlo.OptimizationBarrierOp([other, _argument(weight)])
    _mark(barrier.operation)
    other, weight = barrier.results
    return other, _transposed(weight, transpose)


def _cast_after(other: Value, weight: Value, cast: Value) -> Value:
    """A cast of a weight, made when an operand is there."""
    if 0 in other.type.shape:
        return cast
    argument = _argument(weight)
    branches = hlo.IfOp([_low(argument, cast)], _unknown(other))
    _mark(branches.operation)
    for region in branches.regions:
        with ir.InsertionPoint(region.blocks.append()):
            hlo.return_([hlo.convert(_low(argument, cast), argument)])
    return _transposed(branches.result, made_by(weight, _TRANSPOSE))


def _cast_again(weight: Value, cast: Value) -> Value:
    """The same cast of a weight once more, for one product."""
    argument = _argument(weight)
    low = hlo.convert(_low(argument, cast), argument)
    return _transposed(low, made_by(weight, _TRANSPOSE))


def _low(argument: Value, cast: Value) -> ir.Type:
    """The type of an argument in the dtype of its cast."""
    return ir.RankedTensorType.get(argument.type.shape, cast.type.element_type)


def _unknown(array: Value) -> Value:
    """A boolean that is not known before an array is."""
    zeros, ones = [0] * array.type.rank, [1] * array.type.rank
    first = hlo.slice(array, *map(mlir.dense_int_array, (zeros, ones, ones)))
    scalar = hlo.reshape(ir.RankedTensorType.get([], array.type.element_type), first)
    equal = hlo.ComparisonDirectionAttr.get("EQ")
    found: Value = hlo.compare(scalar, scalar, equal)
    return found


def _mark(operation: ir.Operation) -> None:
    mark: dict[str, ir.Attribute] = {_MARK: ir.StringAttr.get("true")}
    operation.attributes[_OURS] = ir.DictAttr.get(mark)


def _transposed(array: Value, transpose: Any) -> Value:
    """An array in the order of another's transpose, if there is one."""
    if transpose is None:
        return array
    order = transpose.attributes["permutation"]
    result: Value = hlo.TransposeOp(array, order).result
    return result


def _is_ours(operation: ir.Operation) -> bool:
    if operation.name not in (_BARRIER, _BRANCHES, _CASE):
        return False
    attributes = operation.attributes
    return _OURS in attributes and _MARK in ir.DictAttr(attributes[_OURS])


def _loosen(late: ir.Operation) -> None:
    """Has a weight cast before, by the operation that makes its cast late."""
    early: Sequence[Value] = late.operands
    if late.name == _CASE:
        *operations, last = late.regions[1].blocks[0].operations
        for operation in operations:
            operation.move_before(late)
        early = last.operands
    elif late.name == _BRANCHES:
        (cast, _) = late.regions[0].blocks[0].operations
        cast.operation.move_before(late)
        early = [cast.results[0]]
    for result, operand in zip(late.results, early, strict=True):
        result.replace_all_uses_with(operand)
    late.erase()
