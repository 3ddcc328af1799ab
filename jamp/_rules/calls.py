"""Equations that call an inner program: jit and custom_jvp_call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from jamp import _dtypes
from jamp._dtypes import DType
from jamp._emit import Emitter, Scribe
from jamp._records import Entry, Group
from jamp._rules.plain import run_as_traced
from jamp._values import Traits, Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Interpreter


@dataclass(frozen=True)
class Rewritten:
    """An inner program, rewritten for inputs of certain dtypes and traits.

    Attributes:
      program: the new closed jaxpr.
      extras: (input, dtype) pairs: casts of inputs that it takes as further inputs.
      traits: what is known of its results.
      entries: records of its equations.
      changed: whether it differs from the program as traced.
    """

    program: Any
    extras: tuple[tuple[int, DType], ...]
    traits: tuple[Traits, ...]
    entries: list[Entry]
    changed: bool


def rewrite(
    interpreter: Interpreter,
    program: Any,
    operands: Sequence[Value],
    context: Context,
    *,
    hoist: bool = True,
) -> Rewritten:
    """Rewrites an inner program, once for each combination of inputs.

    Args:
      interpreter: runs the equations.
      program: the closed jaxpr as traced.
      operands: the inputs; only their dtypes and traits matter.
      context: what holds around it.
      hoist: whether narrowing casts of inputs are left to the caller, so that a value
        that enters several programs is cast once.
    """
    known = tuple((v.aval, v.traits) for v in operands)
    key = (id(program), known, context, hoist)
    if key not in interpreter.cache:
        rewritten = _rewrite(interpreter, program, operands, context, (), hoist)
        # The cache holds the program too, so that its id stays taken.
        interpreter.cache[key] = (rewritten, program)
    found: Rewritten = interpreter.cache[key][0]
    return found


def _rewrite(
    interpreter: Interpreter,
    program: Any,
    operands: Sequence[Value],
    context: Context,
    extras: tuple[tuple[int, DType], ...],
    hoist: bool,
) -> Rewritten:
    scribe = Scribe()
    traits: list[Traits] = []
    count = len(operands)

    def run(*arrays: Any) -> list[Any]:
        values = [
            Value(array, outer.aval, outer.traits, slot if hoist else None)
            for slot, (array, outer) in enumerate(
                zip(arrays[:count], operands, strict=True)
            )
        ]
        for (slot, dtype), array in zip(extras, arrays[count:], strict=True):
            values[slot].casts[dtype] = array
        results = interpreter.run(program, values, context, scribe)
        traits[:] = [result.traits for result in results]
        return [result.array for result in results]

    avals = [value.aval for value in operands]
    narrowed = [avals[slot].update(dtype=dtype) for slot, dtype in extras]
    rewritten = jax.make_jaxpr(run)(*avals, *narrowed)
    requests = tuple(sorted(scribe.requests, key=lambda r: (r[0], r[1].name)))
    if requests and not extras:
        return _rewrite(interpreter, program, operands, context, requests, hoist)
    return Rewritten(rewritten, extras, tuple(traits), scribe.entries, scribe.changed)


def run_jit(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    emitter: Emitter,
) -> list[Value]:
    """Runs a jitted function; it keeps its name, donation, inlining and shardings."""
    program = eqn.params["jaxpr"]
    if not all(type(value.aval) is jax.core.ShapedArray for value in operands):
        # It takes a reference, or another thing that cannot be traced anew.
        return run_as_traced(eqn, operands, emitter)
    inner = rewrite(interpreter, program, operands, context)
    _note(eqn, emitter, inner.entries, operands)
    arrays = [value.array for value in operands]
    params = dict(eqn.params)
    if inner.changed:
        emitter.scribe.changed = True
        arrays += [emitter.cast(operands[slot], dtype) for slot, dtype in inner.extras]
        params["jaxpr"] = inner.program
        # Every parameter that holds an entry per input needs one for the casts too.
        for name in ("in_shardings", "in_layouts"):
            entries = params[name]
            params[name] = (*entries, *(entries[slot] for slot, _ in inner.extras))
        donated = params["donated_invars"]
        params["donated_invars"] = (*donated, *(False for _ in inner.extras))
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(params))
    return _values(results, inner.traits)


def run_custom_jvp(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    emitter: Emitter,
) -> list[Value]:
    """Runs a custom_jvp function; its rule is kept and runs under the same policy."""
    program = eqn.params["call_jaxpr"]
    inner = rewrite(interpreter, program, operands, context, hoist=False)
    _note(eqn, emitter, inner.entries, operands)
    arrays = [value.array for value in operands]
    if not inner.changed:
        params = eqn.primitive.get_bind_params(eqn.params)
        return _values(eqn.primitive.bind(*arrays, **params), inner.traits)
    emitter.scribe.changed = True

    def primal(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jaxpr_as_fun(inner.program)(*arrays))

    def rule(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return _derivative(
            interpreter, eqn, operands, context, inner, primals, tangents
        )

    primal.__name__ = program.jaxpr.debug_info.func_name
    function = jax.custom_jvp(primal)
    function.defjvp(rule)
    return _values(function(*arrays), inner.traits)


def _derivative(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    inner: Rewritten,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The user's derivative rule, traced as written and run under the policy."""

    def as_traced(primals: Any, tangents: Any) -> Any:
        def call(*arrays: Any) -> Any:
            params = eqn.primitive.get_bind_params(eqn.params)
            return eqn.primitive.bind(*arrays, **params)

        return jax.jvp(call, primals, tangents)

    avals = tuple(var.aval for var in eqn.invars)
    tangent_avals = tuple(aval.to_tangent_aval() for aval in avals)
    program = jax.make_jaxpr(as_traced)(avals, tangent_avals)
    values = [
        Value(array, outer.aval, outer.traits)
        for array, outer in zip(primals, operands, strict=True)
    ]
    values += [Value.of(tangent) for tangent in tangents]
    scribe = Scribe()
    results = interpreter.run(program, values, context, scribe)
    dtypes = [aval.dtype for aval in inner.program.out_avals]
    outs = [
        jax.lax.convert_element_type(value.array, dtype)
        if value.eligible and value.dtype != dtype
        else value.array
        for value, dtype in zip(results, dtypes * 2, strict=True)
    ]
    return tuple(outs[: len(dtypes)]), tuple(outs[len(dtypes) :])


def _note(
    eqn: JaxprEqn,
    emitter: Emitter,
    entries: list[Entry],
    operands: Sequence[Value],
) -> None:
    """Records the inner program under the equation."""
    emitter.record.operands = tuple(_dtypes.dtype_of(value) for value in operands)
    emitter.scribe.entries.append(Group(eqn, entries))


def _values(arrays: Sequence[Any], traits: Sequence[Traits]) -> list[Value]:
    values = []
    for array, known in zip(arrays, traits, strict=True):
        value = Value.of(array)
        value.traits = known
        values.append(value)
    return values
