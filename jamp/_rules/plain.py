"""Equations without inner programs: cast the operands, bind, round the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp import _dtypes
from jamp._dtypes import FLOAT32, DType
from jamp._emit import Emitter, bind
from jamp._plan import primitives
from jamp._records import Origin, Ruling
from jamp._regions import Options
from jamp._rule import Rule
from jamp._rules.dtypes import Dtypes, choose
from jamp._rules.matmul import explicit_precision, product_params
from jamp._rules.site import Site
from jamp._rules.traits import result_traits
from jamp._values import Value


def run_plain(site: Site) -> list[Value]:
    """Runs an equation that has no inner program."""
    _, eqn, operands, context, emitter = site
    ruling = emitter.record.ruling
    if ruling.rule is not Rule.AS_TRACED and _bound_to_dtypes(eqn):
        ruling = emitter.record.ruling = _opaque(eqn)
    dtypes = choose(ruling.rule, eqn, operands, context.region.dtype)
    return emit(eqn, operands, dtypes, emitter)


def run_as_traced(site: Site) -> list[Value]:
    """Runs an equation in the dtypes it was traced in, whatever its rule."""
    _, eqn, operands, _, emitter = site
    emitter.record.ruling = _opaque(eqn)
    dtypes = choose(Rule.AS_TRACED, eqn, operands, emitter.region.dtype)
    return emit(eqn, operands, dtypes, emitter)


def _opaque(eqn: JaxprEqn) -> Ruling:
    """The rule of an equation that can only run as traced."""
    return Ruling(Rule.AS_TRACED, Origin.OPAQUE, eqn.primitive.name)


def _bound_to_dtypes(eqn: JaxprEqn) -> bool:
    """Whether an equation can only run as traced, whatever its rule."""
    name = eqn.primitive.name
    if name in primitives.MATMULS:
        return explicit_precision(eqn)
    return name not in primitives.SCATTERS and any(
        True for _ in jaxprs_in_params(eqn.params)
    )


def emit(
    eqn: JaxprEqn, operands: Sequence[Value], dtypes: Dtypes, emitter: Emitter
) -> list[Value]:
    """Casts, binds and rounds."""
    arrays = [
        value.array if dtype is None else _operand(eqn, value, dtype, emitter)
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    used = [
        value.dtype if dtype is None else dtype
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    emitter.record.operands = tuple(used)
    traced = [_dtypes.dtype_of(var) for var in eqn.invars]
    if used == traced:
        results = bind(eqn, arrays)
    else:
        emitter.scribe.changed = True
        results = _bind_changed(eqn, arrays, used, emitter.region)
    traits = result_traits(eqn, operands, used, emitter)
    values = []
    for array in results:
        value = Value.of(array)
        value.traits = traits
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
    if (
        eqn.primitive.name not in primitives.BROADCASTING
        or dtype not in _dtypes.LOW_DTYPES
    ):
        return emitter.cast(value, dtype)
    shape = _dtypes.shape_of(eqn.outvars[0])
    if value.aval.shape == shape or value.weak:
        return emitter.cast(value, dtype)
    emitter.scribe.changed = True
    wide = emitter.cast(value, FLOAT32)
    spread = jax.lax.broadcast_in_dim(
        wide, shape, range(len(shape) - value.ndim, len(shape))
    )
    return emitter.cast(Value.of(spread), dtype)


def _bind_changed(
    eqn: JaxprEqn, arrays: Sequence[Any], dtypes: Sequence[Any], region: Options
) -> list[Any]:
    """Binds with parameters that fit the new dtypes of the operands."""
    if eqn.primitive.name in primitives.SCATTERS:
        return [scatter(eqn, arrays)]
    if eqn.primitive.name in primitives.MATMULS:
        params = product_params(eqn, _dtypes.widest(dtypes[:2]), region.device_type)
        return bind(eqn, arrays, **params)
    return bind(eqn, arrays)


def scatter(eqn: JaxprEqn, arrays: Sequence[Any]) -> Any:
    """Scatters in other dtypes: an equation's program for one element is in its own."""
    operand, indices, updates = arrays
    public = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))
    return public(
        operand,
        indices,
        updates,
        eqn.params["dimension_numbers"],
        indices_are_sorted=eqn.params["indices_are_sorted"],
        unique_indices=eqn.params["unique_indices"],
        mode=eqn.params["mode"],
    )
