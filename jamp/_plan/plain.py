"""Equations without inner programs: cast the operands, bind, round the result."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._compat import settings
from jamp._dtypes import FLOAT32, DType
from jamp._equations import holds_program
from jamp._plan.dtypes import Dtypes, choose
from jamp._plan.equation import Equation
from jamp._plan.plan import Bind, Broadcast
from jamp._plan.precision import explicit_precision
from jamp._plan.records import Origin, Ruling
from jamp._plan.traits import result_traits
from jamp._plan.values import Value
from jamp._policy.rules import Rule


def plan_plain(equation: Equation) -> list[Value]:
    """Plans an equation that has no inner program."""
    _, eqn, operands, context, caster = equation
    ruling = caster.record.ruling
    if ruling.rule is not Rule.AS_TRACED and _bound_to_dtypes(eqn):
        ruling = caster.record.ruling = _opaque(eqn)
    dtypes = choose(ruling.rule, eqn, operands, context.region.dtype)
    return cast_and_bind(equation, dtypes)


def plan_as_traced(equation: Equation) -> list[Value]:
    """Plans an equation in the dtypes it was traced in, whatever its rule."""
    _, eqn, operands, context, caster = equation
    caster.record.ruling = _opaque(eqn)
    dtypes = choose(Rule.AS_TRACED, eqn, operands, context.region.dtype)
    return cast_and_bind(equation, dtypes)


def _opaque(eqn: JaxprEqn) -> Ruling:
    """The rule of an equation that can only run as traced."""
    return Ruling(Rule.AS_TRACED, Origin.OPAQUE, eqn.primitive.name)


def _bound_to_dtypes(eqn: JaxprEqn) -> bool:
    """Whether an equation can only run as traced, whatever its rule."""
    name = eqn.primitive.name
    if name in primitives.MATMULS:
        return explicit_precision(eqn)
    return holds_program(eqn) and name not in primitives.SCATTERS


def cast_and_bind(equation: Equation, dtypes: Dtypes) -> list[Value]:
    """Plans the casts of an equation's operands, the equation, and its rounding."""
    _, eqn, operands, context, caster = equation
    cast = [
        value if dtype is None else _operand(equation, value, dtype)
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    used = tuple([value.dtype for value in cast])
    caster.record.operands = used
    traced = tuple(map(_dtypes.dtype_of, eqn.invars))
    traits = result_traits(eqn, operands, used, caster)
    results = []
    for var, dtype in zip(eqn.outvars, result_dtypes(eqn, used, traced), strict=True):
        rounded = traits.probability and dtype in _dtypes.LOW_DTYPES
        known = traits._replace(rounded=dtype) if rounded else traits
        results.append(Value.of(var.aval, dtype, known))
    changed = used != traced
    caster.plan.changed |= changed
    device_type = context.region.device_type
    caster.plan.add(Bind(cast, results, eqn, used if changed else None, device_type))
    return [
        caster.cast(value, dtypes.result) if dtypes.result and value.eligible else value
        for value in results
    ]


def _operand(equation: Equation, value: Value, dtype: DType) -> Value:
    """An operand in a dtype.

    The gradient of what an equation broadcasts is a sum: it is broadcast in float32, so
    that the sum is taken in float32 too, and rounded afterwards.
    """
    eqn, caster = equation.eqn, equation.caster
    if (
        eqn.primitive.name not in primitives.BROADCASTING
        or dtype not in _dtypes.LOW_DTYPES
        or value.aval.shape == _dtypes.shape_of(eqn.outvars[0])
        or value.follows
    ):
        return caster.cast(value, dtype)
    spread = Value.of(eqn.outvars[0].aval, FLOAT32)
    caster.plan.changed = True
    caster.plan.add(Broadcast((caster.cast(value, FLOAT32),), (spread,)))
    return caster.cast(spread, dtype)


def result_dtypes(
    eqn: JaxprEqn, used: Sequence[Any], traced: Sequence[Any]
) -> list[Any]:
    """The dtypes of an equation's results.

    Args:
      eqn: the equation.
      used: the dtypes of its operands.
      traced: those with which it was traced.
    """
    outs = [_dtypes.dtype_of(var) for var in eqn.outvars]
    name = eqn.primitive.name
    if used == traced:
        return outs
    if name in primitives.MATMULS:
        return [_dtypes.widest(used[:2])]
    if name in primitives.SCATTERS:
        return [used[0]]
    if name in primitives.COLLECTIVES:
        # They can't be evaluated without the names of their axes.
        return list(used[: len(outs)])
    avals = _dtypes.all_in_dtypes(eqn.invars, used)
    with settings(eqn):
        found, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    results = found if eqn.primitive.multiple_results else [found]
    return [getattr(aval, "dtype", None) for aval in results]
