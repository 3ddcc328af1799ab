"""convert_element_type: the casts that the traced program already holds."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._compat import frames
from jamp._plan import intervals
from jamp._plan.dtypes import Dtypes
from jamp._plan.equation import Equation
from jamp._plan.plain import cast_and_bind, plan_plain
from jamp._plan.values import Value
from jamp._policy.functions import code_of
from jamp._policy.rules import Rule


@cache
def _explicit_codes() -> frozenset[int]:
    casts = (jnp.astype, jax.lax.convert_element_type, jnp.asarray, jnp.array)
    return frozenset(id(code_of(function)) for function in casts)


def _is_explicit(eqn: JaxprEqn) -> bool:
    """Whether the user asked for the cast, and not JAX's promotion of operands."""
    found = frames(eqn)
    return found is None or not _explicit_codes().isdisjoint(map(id, found[0]))


def plan_convert(equation: Equation) -> list[Value]:
    """Plans a cast of the traced program.

    A cast that the user asked for is made. One that promotion inserted to widen an
    operand is not: operands are promoted by the dtypes that they have by now.
    """
    _, eqn, (value,), _, caster = equation
    new_dtype = eqn.params["new_dtype"]
    rule = caster.record.ruling.rule
    if rule is Rule.AS_TRACED or not _dtypes.eligible(new_dtype):
        return plan_plain(equation)
    target = np.dtype(new_dtype)
    if not value.eligible:
        (result,) = cast_and_bind(equation, Dtypes((None,)))
        known = value.traits.interval
        if value.dtype == np.bool_:
            known = intervals.BOOLEAN
        return [result.knowing(result.traits._replace(interval=known))]
    caster.record.operands = (value.dtype,)
    if rule is Rule.FLOAT32:
        return [caster.cast(value, _dtypes.FLOAT32)]
    traced = _dtypes.dtype_of(eqn.invars[0])
    if traced.itemsize < target.itemsize and not _is_explicit(eqn):
        caster.plan.changed = True
        return [value]
    if value.dtype == traced != target:
        (result,) = cast_and_bind(equation, Dtypes((None,)))
        if value.traits.interval is None:
            return [result]
        known = intervals.held(value.traits.interval, target)
        return [result.knowing(value.traits._replace(interval=known))]
    return [caster.cast(value, target)]
