"""Functions with rules of their own for derivatives or batching: the rules are kept.

The user's rule is traced as written, through JAX's own transformation, and the program
that results runs under the same policy as the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp import _dtypes
from jamp._compat import CustomVJPException
from jamp._emit import Scribe
from jamp._regions import holds_region, tracing
from jamp._rules.programs import Rewritten, closed, note, rewrite, to_values
from jamp._rules.site import Site
from jamp._values import Value


def run_custom_jvp(site: Site) -> list[Value]:
    """Runs a custom_jvp function; its rule is kept and runs under the same policy."""
    inner = rewrite(site, site.eqn.params["call_jaxpr"], site.operands)
    note(site, inner)
    if not inner.changed and not _changes_rule(site):
        return to_values(site.bind(site.arrays), inner.traits)
    site.emitter.scribe.changed = True
    function = _with_jvp(site, inner)
    return to_values(function(*site.arrays), inner.traits)


def run_custom_vjp(site: Site) -> list[Value]:
    """Runs a custom_vjp function; its two rules are kept and run under the policy."""
    inner = rewrite(site, site.eqn.params["call_jaxpr"], site.operands)
    note(site, inner)
    site.emitter.scribe.changed = True
    function = _with_vjp(site, inner)
    return to_values(function(*site.arrays), inner.traits)


def run_hi_primitive(site: Site) -> list[Value]:
    """Runs a primitive that expands into others; its derivative rule is kept."""
    primitive: Any = site.eqn.primitive
    avals = [var.aval for var in site.eqn.invars]
    with tracing(site.context.region):
        expanded = jax.make_jaxpr(
            lambda *arrays: primitive.to_lojax(*arrays, **site.eqn.params)
        )(*avals)
    inner = rewrite(site, expanded, site.operands)
    note(site, inner)
    if not inner.changed:
        return to_values(site.bind(site.arrays), inner.traits)
    with_rule = _with_vjp
    with suppress(NotImplementedError):
        _trace_jvp(site)
        with_rule = _with_jvp
    return to_values(with_rule(site, inner)(*site.arrays), inner.traits)


def run_custom_vmap(site: Site) -> list[Value]:
    """Runs a custom_vmap function; its rule is kept and runs under the same policy."""
    interpreter, eqn, operands, context, emitter = site
    inner = rewrite(site, eqn.params["call"], operands)
    note(site, inner)
    emitter.scribe.changed = True

    def rule(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        axes = [0 if b else None for b in batched]
        avals = [
            jax.ShapeDtypeStruct(array.shape, _dtypes.dtype_of(var))
            for array, var in zip(arrays, eqn.invars, strict=True)
        ]
        by_rule = jax.vmap(_call(site), in_axes=axes, axis_size=size)
        with tracing(context.region):
            program = jax.make_jaxpr(by_rule)(*avals)
        values = [Value.of(array) for array in arrays]
        results = interpreter.run(program, values, context, Scribe())
        outs = _in_dtypes(results, inner.dtypes)
        return outs, (True,) * len(outs)

    function = jax.custom_batching.custom_vmap(_primal(eqn, inner))
    function.def_vmap(rule)
    return to_values(function(*site.arrays), inner.traits)


def _with_jvp(site: Site, inner: Rewritten) -> Callable[..., tuple[Any, ...]]:
    """The rewritten function with the derivative rule that the equation has."""

    def rule(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outs = _tangents(site, inner, primals, tangents)
        return outs[: len(inner.dtypes)], outs[len(inner.dtypes) :]

    function = jax.custom_jvp(_primal(site.eqn, inner))
    function.defjvp(rule)
    return function


def _changes_rule(site: Site) -> bool:
    """Whether a rule runs differently under the policy, although its function does not.

    JAX traces the rule of an equation that stays as it is when it is differentiated,
    outside of autocast, where a region would be an error.
    """
    if site.context.forced is not None or site.interpreter.trial:
        return False
    try:
        program, scribe = _trace_jvp(site), Scribe()
    except Exception:  # noqa: BLE001 - for whoever differentiates to see
        return True
    # What is tried must not reach the cache; and a rule may call its own function.
    interpreter = type(site.interpreter)(trial=True)

    def run(*arrays: Any) -> None:
        values = [Value.of(array) for array in arrays]
        interpreter.run(program, values, site.context, scribe)

    jax.eval_shape(run, *program.in_avals)
    return scribe.changed or holds_region(program)


def _trace_jvp(site: Site) -> Any:
    """The program of the results and tangents, by the user's rule as written."""
    avals = tuple(var.aval for var in site.eqn.invars)
    tangents = tuple(aval.to_tangent_aval() for aval in avals)
    with tracing(site.context.region):
        return jax.make_jaxpr(lambda p, t: jax.jvp(_call(site), p, t))(avals, tangents)


def _tangents(
    site: Site,
    inner: Rewritten,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[Any, ...]:
    """Results and their tangents, by the user's rule run under the policy."""
    values = [*_inputs(site, primals), *map(Value.of, tangents)]
    context = site.context._replace(linear=True)
    results = site.interpreter.run(_trace_jvp(site), values, context, Scribe())
    return _in_dtypes(results, inner.dtypes * 2)


def _with_vjp(site: Site, inner: Rewritten) -> Callable[..., tuple[Any, ...]]:
    """The rewritten function with the two rules that the equation has."""
    interpreter, eqn, operands, context, _ = site
    # Not before it is differentiated: a function need not have rules that work.
    rules = cache(partial(_rules, site))

    def fwd(*primals: Any) -> tuple[tuple[Any, ...], list[Any]]:
        count, forward, _ = rules()
        if any(primal.perturbed for primal in primals[:count]):
            # It closes over these operands.
            raise CustomVJPException
        values = _inputs(site, [primal.value for primal in primals])
        results = interpreter.run(forward, values, context, Scribe())
        outs = _in_dtypes(results[: len(inner.dtypes)], inner.dtypes)
        return outs, [value.array for value in results[len(inner.dtypes) :]]

    def bwd(residuals: list[Any], cotangents: Any) -> tuple[Any, ...]:
        count, _, backward = rules()
        arrays = (*residuals, *map(_instantiated, cotangents))
        values = [Value.of(array) for array in arrays]
        results = interpreter.run(backward, values, context, Scribe())
        differentiable = _differentiable(eqn, count)
        dtypes = [operands[slot].dtype for slot in differentiable]
        found = dict(zip(differentiable, _in_dtypes(results, dtypes), strict=True))
        return tuple(found.get(slot) for slot in range(len(operands)))

    function = jax.custom_vjp(_primal(eqn, inner))
    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return function


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return np.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _differentiable(eqn: JaxprEqn, start: int) -> list[int]:
    """Operands of an equation, from one on, that have a gradient."""
    dtypes = map(_dtypes.dtype_of, eqn.invars)
    inexact = [jax.numpy.issubdtype(dtype, np.inexact) for dtype in dtypes]
    return [slot for slot in range(start, len(inexact)) if inexact[slot]]


def _rules(site: Site) -> tuple[int, Any, Any]:
    """How many operands a call closes over, and the programs of its two rules."""
    first, last = site.eqn.params.get("num_consts", 0), len(site.eqn.invars)
    for count in range(first, last):
        # An equation that JAX has traced anew does not know how many they are.
        with suppress(CustomVJPException):
            return count, *_trace_vjp(site, count)
    return last, *_trace_vjp(site, last)


def _trace_vjp(site: Site, count: int) -> tuple[Any, Any]:
    """Programs of the user's forward and backward rules, as written.

    Args:
      site: the call.
      count: how many operands it closes over.
    """
    eqn, trees = site.eqn, []
    differentiable = _differentiable(eqn, count)

    def forward(*arrays: Any) -> tuple[Any, Any]:
        call = partial(_call(site), *arrays[:count])
        outs, pullback = jax.vjp(call, *arrays[count:])
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outs, residuals

    def backward(residuals: Any, cotangents: Any) -> list[Any]:
        gradients = jax.tree.unflatten(trees[-1], residuals)(cotangents)
        return [gradients[slot - count] for slot in differentiable]

    with tracing(site.context.region):
        program = jax.make_jaxpr(forward)(*(var.aval for var in eqn.invars))
        results = list(program.out_avals)
        outs = len(eqn.outvars)
        tangents = [aval.to_tangent_aval() for aval in results[:outs]]
        return program, jax.make_jaxpr(backward)(results[outs:], tangents)


def run_checkpoint(site: Site) -> list[Value]:
    """Runs a checkpointed function; it recomputes in the dtypes of the first run."""
    params = site.eqn.params
    inner = rewrite(site, closed(params["jaxpr"]), site.operands)
    note(site, inner)
    if not inner.changed:
        return to_values(site.bind(site.arrays), inner.traits)
    function = jax.checkpoint(
        inner.__call__, prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return to_values(function(*site.arrays), inner.traits)


def _call(site: Site) -> Callable[..., list[Any]]:
    """The equation as a function, with the user's derivative rule."""
    return lambda *arrays: site.bind(arrays)


def _inputs(site: Site, arrays: Sequence[Any]) -> list[Value]:
    """Values of an equation's inputs inside a derivative rule."""
    return [
        Value(array, outer.aval, outer.traits)
        for array, outer in zip(arrays, site.operands, strict=True)
    ]


def _primal(eqn: JaxprEqn, inner: Rewritten) -> Callable[..., tuple[Any, ...]]:
    def primal(*arrays: Any) -> tuple[Any, ...]:
        return tuple(inner(*arrays))

    program = next(iter(jaxprs_in_params(eqn.params)), None)
    if program is not None:
        primal.__name__ = program.debug_info.func_name
    return primal


def _in_dtypes(values: Sequence[Value], dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of values in the dtypes that JAX expects of a derivative rule."""
    return tuple(
        jax.lax.convert_element_type(value.array, dtype)
        if value.eligible and value.dtype != dtype and _dtypes.eligible(dtype)
        else value.array
        for value, dtype in zip(values, dtypes, strict=True)
    )
