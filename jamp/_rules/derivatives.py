"""Functions with derivative rules of their own: the rules are kept.

The user's rule is traced as written, through JAX's own differentiation, and the program
that results runs under the same policy as the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._emit import Emitter, Scribe
from jamp._rules.programs import Rewritten, note, rewrite, to_values
from jamp._values import Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Interpreter


def run_custom_jvp(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    emitter: Emitter,
) -> list[Value]:
    """Runs a custom_jvp function; its rule is kept and runs under the same policy."""
    inner = rewrite(interpreter, eqn.params["call_jaxpr"], operands, context)
    note(eqn, emitter, operands, inner)
    arrays = [value.array for value in operands]
    if not inner.changed:
        return to_values(_call(eqn)(*arrays), inner.traits)

    def rule(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outs = _tangents(interpreter, eqn, operands, context, inner, primals, tangents)
        return outs[: len(inner.dtypes)], outs[len(inner.dtypes) :]

    function = jax.custom_jvp(_primal(eqn, inner))
    function.defjvp(rule)
    return to_values(function(*arrays), inner.traits)


def _tangents(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    inner: Rewritten,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[Any, ...]:
    """Results and their tangents, by the user's rule run under the policy."""
    avals = tuple(var.aval for var in eqn.invars)
    tangent_avals = tuple(aval.to_tangent_aval() for aval in avals)
    program = jax.make_jaxpr(lambda p, t: jax.jvp(_call(eqn), p, t))(
        avals, tangent_avals
    )
    values = [
        Value(array, outer.aval, outer.traits)
        for array, outer in zip(primals, operands, strict=True)
    ]
    values += [Value.of(tangent) for tangent in tangents]
    results = interpreter.run(program, values, context, Scribe())
    return _in_dtypes(results, inner.dtypes * 2)


def _call(eqn: JaxprEqn) -> Callable[..., Any]:
    """The equation as a function, with the user's derivative rule."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return lambda *arrays: eqn.primitive.bind(*arrays, **params)


def _primal(eqn: JaxprEqn, inner: Rewritten) -> Callable[..., tuple[Any, ...]]:
    def primal(*arrays: Any) -> tuple[Any, ...]:
        return tuple(inner(*arrays))

    primal.__name__ = eqn.params["call_jaxpr"].jaxpr.debug_info.func_name
    return primal


def _in_dtypes(values: Sequence[Value], dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of values in the dtypes that JAX expects of a derivative rule."""
    return tuple(
        jax.lax.convert_element_type(value.array, dtype)
        if value.eligible and value.dtype != dtype and _dtypes.eligible(dtype)
        else value.array
        for value, dtype in zip(values, dtypes, strict=True)
    )
