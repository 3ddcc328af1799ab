"""convert_element_type: the casts that the traced program already holds."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _constants, _dtypes
from jamp._compat import frames
from jamp._functions import code_of
from jamp._rule import Rule
from jamp._rules.dtypes import Dtypes
from jamp._rules.plain import emit, run_plain
from jamp._rules.site import Site
from jamp._values import Value


@cache
def _explicit_codes() -> frozenset[int]:
    casts = (jnp.astype, jax.lax.convert_element_type, jnp.asarray, jnp.array)
    return frozenset(id(code_of(function)) for function in casts)


def _is_explicit(eqn: JaxprEqn) -> bool:
    """Whether the user asked for the cast, and not JAX's promotion of operands."""
    found = frames(eqn)
    return found is None or not _explicit_codes().isdisjoint(map(id, found[0]))


def run_convert(site: Site) -> list[Value]:
    """Runs a cast of the traced program.

    A cast that the user asked for is made. One that promotion inserted to widen an
    operand is not: operands are promoted by the dtypes that they have by now.
    """
    _, eqn, operands, _, emitter = site
    (value,) = operands
    target = np.dtype(eqn.params["new_dtype"]) if _is_dtype(eqn) else None
    rule = emitter.record.ruling.rule
    if target is None or not _dtypes.eligible(target) or rule is Rule.AS_TRACED:
        return run_plain(site)
    if not value.eligible:
        (result,) = emit(eqn, operands, Dtypes((None,)), emitter)
        known = value.traits.interval
        if value.dtype == np.bool_:
            known = _constants.BOOLEAN
        result.traits = result.traits._replace(interval=known)
        return [result]
    emitter.record.operands = (value.dtype,)
    if rule is Rule.FLOAT32:
        return [emitter.converted(value, _dtypes.FLOAT32)]
    traced = _dtypes.dtype_of(eqn.invars[0])
    if traced.itemsize < target.itemsize and not _is_explicit(eqn):
        emitter.scribe.changed = True
        return [value]
    if value.dtype == traced != target:
        (result,) = emit(eqn, operands, Dtypes((None,)), emitter)
        if value.weak:
            result.traits = value.traits
        return [result]
    return [emitter.converted(value, target)]


def _is_dtype(eqn: JaxprEqn) -> bool:
    return not jax.dtypes.issubdtype(eqn.params["new_dtype"], jax.dtypes.extended)
