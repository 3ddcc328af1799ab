"""Dtypes of one equation under a rule: eligibility, constants, scalars and biases."""

import math
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._dtypes import FLOAT32, DType
from jamp._plan import intervals
from jamp._plan.values import Value, Values
from jamp._policy.rules import Rule


class Dtypes(NamedTuple):
    # The dtype for each operand; None leaves it as it is.
    operands: tuple[DType | None, ...]
    result: DType | None = None  # the dtype to which the results are rounded, if any


def choose(rule: Rule, eqn: JaxprEqn, operands: Values, low: DType) -> Dtypes:
    if rule is Rule.LOWER and any(_dtypes.is_complex(v.dtype) for v in operands):
        rule = Rule.AS_TRACED
    if rule is Rule.AS_TRACED or any(_dtypes.is_float64(v.dtype) for v in operands):
        return Dtypes(
            tuple(
                _dtypes.dtype_of(var) if value.eligible else None
                for var, value in zip(eqn.invars, operands, strict=True)
            )
        )
    if rule is Rule.PROMOTE and not _enlarges(eqn, operands):
        return _promote(eqn, operands)
    dtype = low if rule is Rule.LOWER else FLOAT32
    if any(_destroyed(value, dtype) for value in operands):
        dtype = FLOAT32
    rounds = rule in (Rule.INTERNAL_FLOAT32, Rule.PROMOTE)
    result = _activation(operands) if rounds else None
    return Dtypes(tuple(dtype if v.eligible else None for v in operands), result)


def _enlarges(eqn: JaxprEqn, operands: Values) -> bool:
    """Whether an equation repeats values of the program; see `plain._operand`."""
    return (
        eqn.primitive.name in primitives.ENLARGING
        and operands[0].aval.size != math.prod(_dtypes.shape_of(eqn.outvars[0]))
        and not operands[0].follows
    )


def _activation(operands: Values) -> DType | None:
    """The widest dtype among the operands of the highest rank."""
    floats = [v for v in operands if v.eligible and not v.follows]
    if not floats:
        return None
    rank = max(v.ndim for v in floats)
    return _dtypes.widest(v.dtype for v in floats if v.ndim == rank)


def _promote(eqn: JaxprEqn, operands: Values) -> Dtypes:
    """The widest dtype of the operands; constants and scalars follow the others."""
    floats = [v for v in operands if v.eligible]
    firm = [v for v in floats if not v.follows]
    if eqn.primitive.name in primitives.INDEPENDENT or not floats:
        return Dtypes((None,) * len(operands))
    arrays = [v for v in firm if v.traits.rank > 0] or firm
    if not arrays:
        dtype = _dtypes.widest(v.dtype for v in floats)
        return Dtypes(tuple(dtype if v.eligible else None for v in operands))
    dtype = _dtypes.widest(v.dtype for v in arrays)
    if eqn.primitive.name == "add" and _is_bias(*floats):
        dtype = next(v.dtype for v in floats if v.traits.product)
    result = None
    if any(_destroyed(value, dtype) for value in floats):
        dtype = FLOAT32
    elif any(v.dtype == FLOAT32 != dtype for v in firm if v.traits.rank == 0):
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
            and not other.follows
        ):
            return True
    return False


def _destroyed(value: Value, dtype: DType) -> bool:
    interval = value.traits.interval
    return interval is not None and intervals.destroyed(interval, dtype)
