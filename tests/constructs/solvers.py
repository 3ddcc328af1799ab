"""Derivatives taken inside a program, and solvers with implicit derivatives."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import cg

from ._construct import Construct
from .derivatives import doubled_gradient


def by_linear_call(x, w):
    # Its transpose has a sign of its own, which shows whether it is kept.
    forward = lambda w, x: x @ w  # noqa: E731
    backward = lambda w, g: -g @ w.T  # noqa: E731
    return linear_call(forward, backward, lax.stop_gradient(w), x) @ w


def fixed_point(step, start):
    return lax.fori_loop(0, 8, lambda _, z: step(z), start)


def custom_root(x, w):
    def solve(f, start):
        return fixed_point(lambda z: z - f(z), start)

    def tangent_solve(g, y):
        return fixed_point(lambda z: z + y - g(z), y)

    residual = lambda z: z - 0.2 * jnp.tanh(z @ w) - x  # noqa: E731
    return lax.custom_root(residual, x, solve, tangent_solve) @ w


def custom_linear_solve(x, w):
    def solve(matvec, b):
        return fixed_point(lambda v: v + b - matvec(v), b)

    matvec = lambda v: v + 0.1 * (w @ v)  # noqa: E731
    return lax.custom_linear_solve(matvec, x, solve, transpose_solve=solve)


def conjugate_gradient(x, w):
    matvec = lambda v: v + 0.1 * (w.T @ (w @ v))  # noqa: E731
    return cg(matvec, x[0], maxiter=4)[0]


def differential_equation(x, w):
    times = jnp.array([0.0, 0.5])
    flow = lambda y, t: jnp.tanh(y @ w) * t  # noqa: E731
    return odeint(flow, x, times, rtol=1e-2, atol=1e-2, mxstep=8)


def scalar(v, w):
    return jnp.sum(jnp.tanh(v @ w) * v)


def gradient_inside(x, w):
    loss = lambda x: jnp.mean(jnp.tanh(x @ w) ** 2) * 4  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(x)
    return value, x - gradient


def jvp_inside(x, w):
    return jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (x[::-1],))


def linearize_inside(x, w):
    y, push = jax.linearize(lambda x: jnp.tanh(x @ w), x)
    return y, push(x[::-1])


def vjp_inside(x, w):
    y, pull = jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w)
    return y, pull(x)


def transpose_inside(x, w):
    return jax.linear_transpose(lambda x: (x @ w) @ w, x)(x)[0] / 2


def gradient_of_a_custom_vjp_inside(x, w):
    return jax.grad(lambda x: doubled_gradient(x, w).sum())(x)


def gradient_through_scan_inside(x, w):
    step = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
    loss = lambda x: jnp.sum(lax.scan(step, x, length=2)[0] ** 2)  # noqa: E731
    return jax.grad(loss)(x)


def gradient_through_checkpoint_inside(x, w):
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ w))
    return jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x)


CONSTRUCTS = (
    Construct(
        "linear_call",
        by_linear_call,
        no_vmap="JAX has no batching rule for it",
        # The policy does not know it: what is called runs as traced.
        kept=1,
        kept_backward=2,
    ),
    Construct("custom_root", custom_root),
    Construct("custom_linear_solve", custom_linear_solve),
    # Its inner products ask for the highest precision.
    Construct("conjugate_gradient", conjugate_gradient, kept=8, kept_backward=16),
    # Its sums over the stages of a step ask for the highest precision.
    Construct("differential_equation", differential_equation, kept=4, kept_backward=15),
    Construct("gradient_inside", gradient_inside),
    Construct("jvp_inside", jvp_inside),
    Construct("linearize_inside", linearize_inside),
    Construct("vjp_inside", vjp_inside),
    Construct("transpose_inside", transpose_inside),
    Construct("hessian_inside", lambda x, w: jax.hessian(scalar)(x[0], w)),
    Construct(
        "jacobian_forward_inside", lambda x, w: jax.jacfwd(lambda v: v @ w @ w)(x[0])
    ),
    Construct(
        "jacobian_reverse_inside", lambda x, w: jax.jacrev(lambda v: v @ w @ w)(x[0])
    ),
    Construct("gradient_of_a_custom_vjp_inside", gradient_of_a_custom_vjp_inside),
    Construct("gradient_through_scan_inside", gradient_through_scan_inside),
    Construct("gradient_through_checkpoint_inside", gradient_through_checkpoint_inside),
)
