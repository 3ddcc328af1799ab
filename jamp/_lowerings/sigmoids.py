"""Sigmoids of 16-bit arrays, and gradients of them and of tanh, rounded once.

XLA makes a sigmoid of operations that each round, and JAX's derivatives of both do so,
too. As in PyTorch, the derivative is computed in float32 here, from the result, which
the backward pass keeps in 16 bits.
"""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jamp._dtypes import widened
from jamp._lowerings.own_primitives import like, register, with_rules_of_jax

Function = Callable[..., Any]


def _sigmoid(x: Any, **params: Any) -> Any:
    return lax.logistic_p.bind(widened(x), **params).astype(x.dtype)


def _define(
    of_jax: Primitive, run: Function, slope: Function, curvature: Function
) -> Primitive:
    """A function like one of JAX's.

    Args:
      of_jax: the function of JAX's.
      run: what it is, in JAX's operations.
      slope: its derivative, from its result.
      curvature: the derivative of that, from the result as well.
    """
    primitive = like(of_jax)
    with_rules_of_jax({of_jax: primitive})
    # Linear in what it multiplies with the slope. Its name is for those who count.
    product = like(lax.mul_p)
    with_rules_of_jax({lax.mul_p: product})

    def multiply(result: Any, along: Any) -> Any:
        made = lax.mul(slope(widened(result)), widened(along))
        return made.astype(along.dtype)

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        result = primitive.bind(*primals, **params)
        return result, product.bind(result, *tangents)

    def product_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (result, along), (of_result, tangent) = primals, tangents
        if not isinstance(tangent, ad.Zero):
            tangent = product.bind(result, tangent)
        if not isinstance(of_result, ad.Zero):
            factor = lax.mul(curvature(widened(result)), widened(along))
            term = lax.mul(widened(of_result), factor)
            tangent = ad.add_tangents(tangent, term.astype(along.dtype))
        return product.bind(*primals), tangent

    def transpose(cotangent: Any, result: Any, along: Any) -> list[Any]:
        if isinstance(cotangent, ad.Zero):
            return [None, ad.Zero(along.aval)]
        shape, made = along.aval.shape, cotangent.shape
        # Of a batch, all may have one tangent in common.
        shared = [d for d, size in enumerate(made) if shape[d : d + 1] != (size,)]
        if not shared:
            return [None, product.bind(result, cotangent)]
        terms = product.bind(widened(result), widened(cotangent))
        total = lax.reshape(lax.reduce_sum(terms, shared), shape)
        return [None, total.astype(along.aval.dtype)]

    register(primitive, run)
    register(product, multiply)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_jvps[product] = product_jvp
    ad.primitive_transposes[product] = transpose
    return primitive


OWN = {
    of_jax: _define(of_jax, *functions)
    for of_jax, *functions in (
        (lax.logistic_p, _sigmoid, lambda y: y * (1 - y), lambda y: 1 - 2 * y),
        # XLA computes it in float32 itself.
        (lax.tanh_p, lax.tanh_p.bind, lambda y: 1 - y * y, lambda y: -2 * y),
    )
}
