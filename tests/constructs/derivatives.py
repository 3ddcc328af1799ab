"""Functions and primitives with derivative rules of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import hijax

from ._construct import Construct


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.tanh(x @ w)


def _doubled_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _doubled_backward(residuals, g):
    x, w, y = residuals
    g = g * (1 - y * y)
    return 2 * (g @ w.T), x.T @ g


doubled_gradient.defvjp(_doubled_forward, _doubled_backward)


def custom_vjp_in_scan(x, w):
    step = lambda c, _: (doubled_gradient(c, w), None)  # noqa: E731
    return lax.scan(step, x, None, length=2)[0]


def custom_vjp_in_cond(x, w):
    return lax.cond(x.sum() > 0, doubled_gradient, lambda x, w: x @ w.T, x, w)


def custom_vjp_in_jit_in_custom_vjp(x, w):
    outer = jax.custom_vjp(jax.jit(doubled_gradient))
    outer.defvjp(
        lambda x, w: jax.vjp(jax.jit(doubled_gradient), x, w),
        lambda pull, g: pull(g / 2),
    )
    return outer(x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def activated(activation, x, w, power):
    return activation(x @ w) ** power


def _activated_forward(activation, x, w, power):
    return activated(activation, x, w, power), (x, w)


def _activated_backward(activation, power, residuals, g):
    _, pull = jax.vjp(lambda x, w: activation(x @ w) ** power, *residuals)
    return pull(g)


activated.defvjp(_activated_forward, _activated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale",))
def scaled(x, w, scale):
    return jnp.tanh(x @ w) * scale


scaled.defvjp(
    lambda x, w, scale: (scaled(x, w, scale), (x, w)),
    lambda scale, residuals, g: (scale * g @ residuals[1].T, residuals[0].T @ g),
)


@jax.custom_vjp
def of_a_pytree(arguments, n):
    hidden = jnp.tanh(arguments["x"] @ arguments["w"])
    return {"hidden": hidden * n, "n": n, "nothing": None}


def _of_a_pytree_forward(arguments, n):
    return of_a_pytree(arguments, n), (arguments, n)


def _of_a_pytree_backward(residuals, g):
    arguments, n = residuals
    g = g["hidden"] * n
    return {"x": g @ arguments["w"].T, "w": arguments["x"].T @ g}, None


of_a_pytree.defvjp(_of_a_pytree_forward, _of_a_pytree_backward)


@jax.custom_vjp
def with_symbolic_zeros(x, w):
    return jnp.tanh(x @ w), x @ w.T


def _symbolic_forward(x, w):
    results = with_symbolic_zeros(x.value, w.value)
    return results, (x.value if w.perturbed else None, w.value, results[0])


def _symbolic_backward(residuals, cotangents):
    x, w, y = residuals
    first, second = cotangents
    g_x, g_w = jnp.zeros_like(y), jnp.zeros_like(w)
    if type(first) is not SymbolicZero:
        first = first * (1 - y * y)
        g_x += first @ w.T
        g_w += 0.0 if x is None else x.T @ first
    if type(second) is not SymbolicZero:
        g_x += second @ w
        g_w += 0.0 if x is None else second.T @ x
    return g_x, g_w


with_symbolic_zeros.defvjp(_symbolic_forward, _symbolic_backward, symbolic_zeros=True)


@jax.custom_vjp
def remat_optimized(x, w):
    return jnp.tanh(x @ w)


remat_optimized.defvjp(_doubled_forward, _doubled_backward, optimize_remat=True)


def remat_optimized_in_checkpoint(x, w):
    return jax.checkpoint(lambda x: remat_optimized(x, w) @ w)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied(fn, x, *captured):
    return fn(x, *captured)


def _applied_backward(fn, residuals, g):
    return jax.vjp(fn, *residuals)[1](g)


applied.defvjp(
    lambda fn, x, *captured: (fn(x, *captured), (x, *captured)), _applied_backward
)


def closure_converted(x, w):
    converted, captured = jax.closure_convert(lambda x: jnp.tanh(x @ w), x)
    return applied(converted, x, *captured)


def with_captured_arrays(x, w):
    captured = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4)

    @jax.custom_vjp
    def product(x):
        return jnp.tanh(captured @ x)

    def backward(x, g):
        slope = 1 - jnp.tanh(captured @ x) ** 2
        return (2 * captured.T @ (g * slope),)

    product.defvjp(lambda x: (product(x), x), backward)
    return product(x) @ w


@jax.custom_gradient
def by_custom_gradient(x, w):
    y = jnp.tanh(x @ w)
    return y, lambda g: ((g * (1 - y * y)) @ w.T, x.T @ (g * (1 - y * y)))


@jax.custom_jvp
def by_custom_jvp(x, w):
    return jnp.tanh(x @ w)


@by_custom_jvp.defjvp
def _by_custom_jvp_rule(primals, tangents):
    (x, w), (x_dot, w_dot) = primals, tangents
    y = by_custom_jvp(x, w)
    return y, (1 - y * y) * (x_dot @ w + x @ w_dot)


@jax.custom_jvp
def jvp_with_symbolic_zeros(x, w):
    return x @ w


def _skipping_zeros(primals, tangents):
    (x, w), (x_dot, w_dot) = primals, tangents
    total = jnp.zeros(x.shape[:1] + w.shape[1:], x.dtype)
    if type(x_dot) is not SymbolicZero:
        total += x_dot @ w
    if type(w_dot) is not SymbolicZero:
        total += x @ w_dot
    return x @ w, total


jvp_with_symbolic_zeros.defjvp(_skipping_zeros, symbolic_zeros=True)


@jax.custom_jvp
def jvp_by_argument(x, w):
    return x @ w


jvp_by_argument.defjvps(
    lambda x_dot, y, x, w: x_dot @ w, lambda w_dot, y, x, w: x @ w_dot
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def jvp_with_a_callable(activation, x, n, w):
    return activation(x @ w) * n


@jvp_with_a_callable.defjvp
def _jvp_with_a_callable_rule(activation, primals, tangents):
    (x, n, w), (x_dot, _, w_dot) = primals, tangents
    fn = lambda x, w: activation(x @ w) * n  # noqa: E731
    return jax.jvp(fn, (x, w), (x_dot, w_dot))


HiPrimitive = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class Product(HiPrimitive):
    """The hyperbolic tangent of a matrix product as a primitive of its own."""

    def __init__(self, x, w):
        self.in_avals = x, w
        self.out_aval = x.update(shape=(*x.shape[:-1], w.shape[-1]))
        self.params = {}
        super().__init__()

    def expand(self, x, w):
        return jnp.tanh(x @ w)

    def vjp_fwd(self, nonzero, x, w):
        y = self(x, w)
        return y, (x, w, y)

    def vjp_bwd_retval(self, residuals, g):
        x, w, y = residuals
        g = g * (1 - y * y)
        return g @ jnp.swapaxes(w, -1, -2), jnp.swapaxes(x, -1, -2) @ g

    def batch(self, axis_data, args, dims):
        x, w = (
            jnp.broadcast_to(arg, (axis_data.size, *arg.shape))
            if dim is None
            else jnp.moveaxis(arg, dim, 0)
            for arg, dim in zip(args, dims, strict=True)
        )
        return high_level(x, w), 0


def high_level(x, w):
    return Product(jax.typeof(x), jax.typeof(w))(x, w)


def hi_primitive_in_scan(x, w):
    step = lambda c, _: (high_level(c, w), c @ w)  # noqa: E731
    return lax.scan(step, x, length=2)


def squared_by_its_exponent(x, w):
    mantissa, exponent = jnp.frexp(x @ w)
    return jnp.ldexp(mantissa * mantissa, 2 * exponent) @ w


@jax.custom_jvp
def with_a_loop_in_its_rule(x, w):
    return lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c @ w), x)


with_a_loop_in_its_rule.defjvp(
    lambda primals, tangents: jax.jvp(with_a_loop_in_its_rule.fun, primals, tangents)
)


@jax.custom_jvp
def with_a_matmul_in_its_rule_alone(x):
    return x * 2


@with_a_matmul_in_its_rule_alone.defjvp
def _with_a_matmul_in_its_rule_alone(primals, tangents):
    return with_a_matmul_in_its_rule_alone(*primals), tangents[0] @ jnp.eye(4) * 2


CONSTRUCTS = (
    Construct("custom_vjp", doubled_gradient),
    Construct("custom_vjp_in_scan", custom_vjp_in_scan),
    Construct("custom_vjp_in_cond", custom_vjp_in_cond),
    Construct("custom_vjp_in_jit_in_custom_vjp", custom_vjp_in_jit_in_custom_vjp),
    Construct(
        "custom_vjp_with_static_arguments",
        lambda x, w: activated(jnp.tanh, x, w, 2) + scaled(x, w, scale=0.5),
    ),
    Construct(
        "custom_vjp_of_a_pytree",
        lambda x, w: of_a_pytree({"x": x, "w": w}, jnp.int32(2)),
    ),
    Construct("custom_vjp_with_symbolic_zeros", with_symbolic_zeros),
    Construct(
        "custom_vjp_with_a_zero_cotangent",
        lambda x, w: with_symbolic_zeros(x, lax.stop_gradient(w))[0],
    ),
    Construct("custom_vjp_remat_optimized", remat_optimized),
    Construct("custom_vjp_remat_in_checkpoint", remat_optimized_in_checkpoint),
    Construct("custom_vjp_over_a_closure", closure_converted),
    Construct("custom_vjp_of_captured_arrays", with_captured_arrays),
    Construct("custom_gradient", by_custom_gradient),
    Construct("custom_jvp", by_custom_jvp),
    Construct("custom_jvp_with_symbolic_zeros", jvp_with_symbolic_zeros),
    Construct(
        "custom_jvp_with_a_zero_tangent",
        lambda x, w: jvp_with_symbolic_zeros(x, lax.stop_gradient(w)),
    ),
    Construct("custom_jvp_by_argument", jvp_by_argument),
    Construct(
        "custom_jvp_with_a_callable",
        lambda x, w: jvp_with_a_callable(jnp.tanh, x, jnp.int32(2), w),
    ),
    Construct(
        "custom_jvp_in_scan",
        lambda x, w: lax.scan(lambda c, _: (by_custom_jvp(c, w), c), x, length=2),
    ),
    Construct("custom_jvp_with_a_loop_in_its_rule", with_a_loop_in_its_rule),
    Construct(
        "custom_jvp_with_a_matmul_in_its_rule_alone",
        lambda x, w: with_a_matmul_in_its_rule_alone(x) @ w,
    ),
    Construct("hi_primitive", lambda x, w: high_level(x, w) @ w),
    Construct("hi_primitive_in_scan", hi_primitive_in_scan),
    # JAX 0.12 has primitives of this kind for them.
    Construct("frexp_and_ldexp", squared_by_its_exponent),
    Construct(
        "frexp_in_scan",
        lambda x, w: lax.scan(lambda c, _: (jnp.frexp(c @ w)[0], c), x, length=2),
    ),
)
