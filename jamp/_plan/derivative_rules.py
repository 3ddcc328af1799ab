"""The programs of the derivative rules that an equation has, traced as written."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._compat import CustomVJPException
from jamp._equations import bind
from jamp._tracing.regions import Options, tracing


class VjpRules(NamedTuple):
    """The two rules of a custom_vjp function.

    Attributes:
      closed_over: how many operands it closes over.
      forward: the program of its results and residuals.
      backward: the program of its gradients.
    """

    closed_over: int
    forward: Any
    backward: Any


def call_of(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """An equation as a function, with the user's rule."""
    return lambda *arrays: bind(eqn, arrays)


def trace_jvp(eqn: JaxprEqn, options: Options) -> Any:
    """The program of the results and tangents."""
    avals = tuple(var.aval for var in eqn.invars)
    tangents = tuple(aval.to_tangent_aval() for aval in avals)
    with tracing(options):
        return jax.make_jaxpr(lambda p, t: jax.jvp(call_of(eqn), p, t))(avals, tangents)


def trace_vjp(eqn: JaxprEqn, options: Options) -> VjpRules:
    """The programs of a function's forward and backward rules."""
    first, last = eqn.params.get("num_consts", 0), len(eqn.invars)
    for count in range(first, last):
        # An equation that JAX has traced anew does not know how many they are.
        with suppress(CustomVJPException):
            return _trace_vjp(eqn, options, count)
    return _trace_vjp(eqn, options, last)


def differentiable(eqn: JaxprEqn, start: int) -> list[int]:
    """Operands of an equation, from one on, that have a gradient."""
    dtypes = map(_dtypes.dtype_of, eqn.invars)
    inexact = [jax.numpy.issubdtype(dtype, np.inexact) for dtype in dtypes]
    return [slot for slot in range(start, len(inexact)) if inexact[slot]]


def _trace_vjp(eqn: JaxprEqn, options: Options, count: int) -> VjpRules:
    trees: list[Any] = []
    slots = differentiable(eqn, count)

    def forward(*arrays: Any) -> tuple[Any, Any]:
        call = partial(call_of(eqn), *arrays[:count])
        outs, pullback = jax.vjp(call, *arrays[count:])
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outs, residuals

    def backward(residuals: Any, cotangents: Any) -> list[Any]:
        gradients = jax.tree.unflatten(trees[-1], residuals)(cotangents)
        return [gradients[slot - count] for slot in slots]

    with tracing(options):
        program = jax.make_jaxpr(forward)(*(var.aval for var in eqn.invars))
        results = list(program.out_avals)
        outs = len(eqn.outvars)
        tangents = [aval.to_tangent_aval() for aval in results[:outs]]
        residuals = results[outs:]
        return VjpRules(count, program, jax.make_jaxpr(backward)(residuals, tangents))
