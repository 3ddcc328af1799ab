"""Programs of an idiom: its results and gradients, plain and with 16-bit products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ._idiom import Idiom

# Every rounding is made, and what runs a few times is compiled quickly.
COMPILER = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
}
_PRODUCTS = ("dot_general", "conv_general_dilated")


def flat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a function as a list."""
    return lambda *args: jax.tree.leaves(fn(*args))


def differentiated(fn: Callable[..., Any], idiom: Idiom) -> Callable[..., Any]:
    """The results of a function, and its gradients.

    Returns:
      A jitted function of the activation, the parameters and the cotangents of the
      results. It returns the results, and the gradients of the activation and of the
      floating parameters.
    """
    floats = [i for i, p in enumerate(idiom.parameters) if p.dtype.kind == "f"]

    def run(x: Any, parameters: Any, cotangents: Any) -> Any:
        def of_floats(x: Any, *values: Any) -> Any:
            arguments = list(parameters)
            for i, value in zip(floats, values, strict=True):
                arguments[i] = value
            return fn(x, *arguments)

        results, pull = jax.vjp(of_floats, x, *(parameters[i] for i in floats))
        pairs = zip(cotangents, results, strict=True)
        return results, pull([c.astype(y.dtype) for c, y in pairs])

    return jax.jit(run, compiler_options=COMPILER)


def contracts(jaxpr: object) -> bool:
    """Whether a program holds a product."""
    return any(name in str(jaxpr) for name in _PRODUCTS)


def with_16_bit_products(jaxpr: ClosedJaxpr, low: Any) -> Callable[..., Any]:
    """A program that rounds the operands and the results of its products.

    So does its derivative.
    """
    info = jnp.finfo(low)

    def rounded(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.lax.reduce_precision(x, info.nexp, info.nmant)

    def run(*arguments: Any) -> list[Any]:
        variables = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
        known = dict(zip(variables, [*jaxpr.consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            primitive, parameters = equation.primitive, equation.params
            if primitive.name in ("jit", "pjit") and contracts(parameters["jaxpr"]):
                results = with_16_bit_products(parameters["jaxpr"], low)(*operands)
            elif primitive.name in _PRODUCTS:
                product = primitive.bind(*map(rounded, operands), **parameters)
                results = [rounded(product)]
            else:
                if primitive.name == "scan" and contracts(parameters["jaxpr"]):
                    body = with_16_bit_products(parameters["jaxpr"], low)
                    made = jax.make_jaxpr(body)(*parameters["jaxpr"].in_avals)
                    parameters = parameters | {"jaxpr": made}
                parameters = primitive.get_bind_params(parameters)
                results = primitive.bind(*operands, **parameters)
                results = results if primitive.multiple_results else [results]
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.jaxpr.outvars]

    return run
