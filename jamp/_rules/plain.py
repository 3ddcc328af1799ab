"""Equations without inner programs: cast the operands, bind, round the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _constants, _dtypes
from jamp._dtypes import FLOAT32, DType
from jamp._emit import Emitter
from jamp._policy import Rule
from jamp._records import MATMULS
from jamp._rules.matmul import explicit_precision
from jamp._values import Traits, Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Interpreter

# Their operands need not agree in dtype.
_INDEPENDENT = frozenset({"sort", "optimization_barrier", "top_k", "approx_top_k"})

# They move data, so that what is known of their operand is known of their result.
_MOVEMENT = frozenset(
    {
        "broadcast_in_dim",
        "broadcast_to",
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "optimization_barrier",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    }
)
_KEEPS_PROBABILITY = frozenset({"add", "clamp", "max", "min", "mul", "neg", "sub"})

# Elementwise primitives that broadcast dimensions of size one, and scalars.
_BROADCASTING = frozenset(
    {"add", "atan2", "div", "max", "min", "mul", "pow", "rem", "sub"}
)

_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-max": jax.lax.scatter_max,
    "scatter-min": jax.lax.scatter_min,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-sub": jax.lax.scatter_sub,
}


class Dtypes(NamedTuple):
    """Dtypes for one equation.

    Attributes:
      operands: the dtype for each operand; None leaves it as it is.
      result: the dtype to which the results are rounded, if any.
    """

    operands: tuple[DType | None, ...]
    result: DType | None = None


def run_plain(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    emitter: Emitter,
) -> list[Value]:
    """Runs an equation that has no inner program."""
    del interpreter
    rule = emitter.record.ruling.rule
    if eqn.primitive.name in MATMULS and rule is not Rule.AS_TRACED:
        if explicit_precision(eqn):
            rule = Rule.AS_TRACED
            source = "precision asked for in the program"
            emitter.record.ruling = emitter.record.ruling._replace(
                rule=rule, source=source
            )
    dtypes = choose(rule, eqn, operands, context.region.dtype)
    return emit(eqn, operands, dtypes, emitter)


def emit(
    eqn: JaxprEqn, operands: Sequence[Value], dtypes: Dtypes, emitter: Emitter
) -> list[Value]:
    """Casts, binds and rounds."""
    arrays = [
        value.array if dtype is None else _operand(eqn, value, dtype, emitter)
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    used = [
        _dtypes.dtype_of(value) if dtype is None else dtype
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    emitter.record.operands = tuple(used)
    traced = [_dtypes.dtype_of(var) for var in eqn.invars]
    if used == traced:
        results = _bind(eqn, arrays, eqn.params)
    else:
        emitter.scribe.changed = True
        results = _bind_changed(eqn, arrays, used)
    traits = _traits(eqn, operands, used, emitter)
    values = []
    for array in results:
        value = Value.of(array)
        value.traits = traits._replace(
            rank=min(traits.rank, len(_dtypes.shape_of(value)))
        )
        if dtypes.result is not None and value.eligible:
            value = emitter.converted(value, dtypes.result)
        if value.traits.probability and value.dtype in _dtypes.LOW_DTYPES:
            value.traits = value.traits._replace(rounded=value.dtype)
        values.append(value)
    return values


def _operand(eqn: JaxprEqn, value: Value, dtype: DType, emitter: Emitter) -> Any:
    """An operand in a dtype.

    The gradient of what an equation broadcasts is a sum: it is broadcast in float32, so
    that the sum is taken in float32 too, and rounded afterwards.
    """
    shape = _dtypes.shape_of(eqn.outvars[0])
    broadcasts = eqn.primitive.name in _BROADCASTING and value.aval.shape != shape
    if not broadcasts or dtype not in _dtypes.LOW_DTYPES or value.weak:
        return emitter.cast(value, dtype)
    emitter.scribe.changed = True
    wide = emitter.cast(value, FLOAT32)
    spread = jax.lax.broadcast_in_dim(
        wide, shape, range(len(shape) - value.ndim, len(shape))
    )
    return emitter.cast(Value.of(spread), dtype)


def _bind(eqn: JaxprEqn, arrays: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _bind_changed(
    eqn: JaxprEqn, arrays: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Binds with parameters that fit the new dtypes of the operands."""
    scatter = _SCATTERS.get(eqn.primitive.name)
    if scatter is not None:
        # The parameters hold a program for one element in the traced dtype.
        return [
            scatter(
                arrays[0],
                arrays[1],
                arrays[2],
                eqn.params["dimension_numbers"],
                indices_are_sorted=eqn.params["indices_are_sorted"],
                unique_indices=eqn.params["unique_indices"],
                mode=eqn.params["mode"],
            )
        ]
    params = dict(eqn.params)
    preferred = params.get("preferred_element_type")
    if preferred is not None and _dtypes.eligible(np.dtype(preferred)):
        params["preferred_element_type"] = _dtypes.widest(dtypes[:2])
    return _bind(eqn, arrays, params)


def choose(rule: Rule, eqn: JaxprEqn, operands: Sequence[Value], low: DType) -> Dtypes:
    """The dtypes in which an equation runs under a rule."""
    traced = tuple(
        _dtypes.dtype_of(var) if value.eligible else None
        for var, value in zip(eqn.invars, operands, strict=True)
    )
    if rule is Rule.AS_TRACED or any(
        _dtypes.is_float64(_dtypes.dtype_of(value)) for value in operands
    ):
        return Dtypes(traced)
    if rule is Rule.PROMOTE and not _enlarges(eqn, operands):
        return _promote(eqn, operands)
    dtype = low if rule is Rule.LOWER else FLOAT32
    if any(_destroyed(value, dtype) for value in operands):
        dtype = FLOAT32
    rounds = rule in (Rule.INTERNAL_FLOAT32, Rule.PROMOTE)
    result = _activation(operands) if rounds else None
    return Dtypes(tuple(dtype if v.eligible else None for v in operands), result)


def _enlarges(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Whether an equation repeats values of the program; see `_operand`."""
    return (
        eqn.primitive.name in ("broadcast_in_dim", "broadcast_to", "tile")
        and operands[0].aval.size != math.prod(_dtypes.shape_of(eqn.outvars[0]))
        and not operands[0].weak
    )


def _activation(operands: Sequence[Value]) -> DType | None:
    """The widest dtype among the operands of the highest rank."""
    floats = [v for v in operands if v.eligible and not v.weak]
    if not floats:
        return None
    rank = max(v.ndim for v in floats)
    return _dtypes.widest(v.dtype for v in floats if v.ndim == rank)


def _promote(eqn: JaxprEqn, operands: Sequence[Value]) -> Dtypes:
    """The widest dtype of the operands; constants and scalars follow the others."""
    floats = [v for v in operands if v.eligible]
    firm = [v for v in floats if not v.weak]
    if eqn.primitive.name in _INDEPENDENT or not floats:
        return Dtypes((None,) * len(operands))
    arrays = [v for v in firm if v.ndim > 0] or firm
    if not arrays:
        dtype = _dtypes.widest(v.dtype for v in floats)
        return Dtypes(tuple(dtype if v.eligible else None for v in operands))
    dtype = _dtypes.widest(v.dtype for v in arrays)
    if eqn.primitive.name == "add" and _is_bias(*floats):
        dtype = next(v.dtype for v in floats if v.traits.product)
    result = None
    if any(_destroyed(value, dtype) for value in floats):
        dtype = FLOAT32
    elif any(v.dtype == FLOAT32 != dtype for v in firm if v.ndim == 0):
        # A scalar of the program may be out of range, and its gradient is a sum: round
        # the result, not the scalar.
        result, dtype = dtype, FLOAT32
    return Dtypes(tuple(dtype if v.eligible else None for v in operands), result)


def _is_bias(x: Value, y: Value) -> bool:
    """Whether one is a lowered product and the other a value of lower rank."""
    for product, other in ((x, y), (y, x)):
        if (
            product.traits.product
            and product.dtype in _dtypes.LOW_DTYPES
            and other.traits.rank < product.ndim
            and not other.weak
        ):
            return True
    return False


def _destroyed(value: Value, dtype: DType) -> bool:
    interval = value.traits.interval
    return interval is not None and _constants.destroyed(interval, dtype)


def _traits(
    eqn: JaxprEqn, operands: Sequence[Value], used: Sequence[Any], emitter: Emitter
) -> Traits:
    """What is known of an equation's results."""
    name = eqn.primitive.name
    rank = max((len(_dtypes.shape_of(v)) for v in eqn.outvars), default=0)
    floats = [v for v in operands if v.eligible]
    ruling = emitter.record.ruling
    interval = None
    if ruling.rule is Rule.PROMOTE and all(v.weak for v in floats):
        interval = _constants.propagate(eqn, [v.traits.interval for v in floats])
    if name in MATMULS:
        return Traits(rank=rank, product=all(d in _dtypes.LOW_DTYPES for d in used[:2]))
    unsafe = emitter.region.policy.unsafe
    if any(name in u.of for u in unsafe):
        return Traits(rank=rank, probability=True)
    if name in _MOVEMENT and floats:
        source = floats[0].traits
        return source._replace(
            interval=interval, rank=_rank_after(eqn, source.rank, rank)
        )
    traits = Traits(interval, rank)
    if unsafe and name in _KEEPS_PROBABILITY:
        firm = [v for v in floats if not v.weak]
        if len(firm) == 1 and firm[0].traits.probability:
            return traits._replace(probability=True, rounded=firm[0].traits.rounded)
    return traits


def _rank_after(eqn: JaxprEqn, before: int, ndim: int) -> int:
    """Rank of a moved value, without the dimensions that moving it added."""
    if eqn.primitive.name == "reshape":
        old, new = map(_dtypes.shape_of, (eqn.invars[0], eqn.outvars[0]))
        if [d for d in old if d != 1] != [d for d in new if d != 1]:
            return ndim
    return min(before, ndim)
