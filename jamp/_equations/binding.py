"""Binds equations again, op by op where JAX looks for NaN."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive, jaxpr_as_fun

from jamp._compat import array_in, becomes_a_program, checkpoint, settings
from jamp._equations.walks import closed
from jamp._primitives import CALLS


def bind(eqn: JaxprEqn, arrays: Sequence[Any], **params: Any) -> list[Any]:
    """Binds an equation's primitive, with some other parameters than traced."""
    return bind_primitive(eqn.primitive, {**eqn.params, **params}, arrays)


def bind_primitive(
    primitive: Primitive, params: dict[str, Any], arrays: Sequence[Any]
) -> list[Any]:
    if primitive.name in _OPENED and _checks_each():
        return _op_by_op(closed(params[CALLS[primitive.name]]), arrays)
    results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def checkpointed(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that is run again for its derivative, but where JAX looks for NaN."""
    return function if _checks_each() else checkpoint(function, **options)


def looks_for_nans() -> bool:
    """Whether JAX raises where a NaN or an infinity is computed."""
    return bool(_looked_for())


def _looked_for() -> list[Callable[[Any], Any]]:
    """What tells the numbers at which JAX raises."""
    checks = {"jax_debug_nans": jax.numpy.isnan, "jax_debug_infs": jax.numpy.isinf}
    return [check for flag, check in checks.items() if getattr(jax.config, flag)]


def _checks_each() -> bool:
    """Whether operations run at this moment, and JAX looks for NaN in what each gives.

    Of what runs as one for it, as a jitted function does, it would not say where.
    """
    return looks_for_nans() and not becomes_a_program()


# Calls that JAX itself runs op by op to find a NaN that they give.
_OPENED = frozenset({"closed_call", "jit", "remat2"})


def _op_by_op(program: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of a program, of which each operation runs by itself.

    As it does itself, JAX looks for NaN inside only if there is one in a result: one
    that `where` leaves out does no harm.
    """
    # Operations that ran by themselves unseen JAX would not look at later either.
    with jax.debug_nans(False), jax.debug_infs(False):
        results: list[Any] = jax.jit(jaxpr_as_fun(program))(*arrays)
    return results if _are_fine(results) else _each_by_itself(program, arrays)


def _are_fine(arrays: Sequence[Any]) -> bool:
    """Whether JAX would not raise for some arrays; False where that is not known."""
    held = list(map(array_in, arrays))
    if any(array is None for array in held):
        return False
    inexact = [a for a in held if jax.numpy.issubdtype(a.dtype, np.inexact)]
    return not any(check(array).any() for array in inexact for check in _looked_for())


def _each_by_itself(program: Any, arrays: Sequence[Any]) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, arrays, strict=True))
    return values_of(jaxpr.outvars, evaluated(jaxpr.eqns, env))


def evaluated(eqns: Iterable[JaxprEqn], env: dict[Any, Any]) -> dict[Any, Any]:
    """The arrays of variables, and of those that equations make of them."""
    for eqn in eqns:
        with settings(eqn):
            results = bind(eqn, values_of(eqn.invars, env))
        env.update(zip(eqn.outvars, results, strict=True))
    return env


def values_of(atoms: Iterable[Any], env: dict[Any, Any]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]
