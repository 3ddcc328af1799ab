"""A derivative rule that computes in float16 by its own hand."""

import jax
import jax.numpy as jnp

import jamp

from . import Fault, normal


def with_rule(dtype):
    """The cube of a number, whose derivative is computed in a dtype."""

    @jax.custom_vjp
    def cube(x):
        return x * x * x

    def cube_fwd(x):
        return cube(x), x

    def cube_bwd(x, g):
        slope = (3e5 * x * x).astype(dtype)  # FAULT
        return (g * slope * 1e-5,)

    cube.defvjp(cube_fwd, cube_bwd)
    return cube


narrow_cube, wide_cube = with_rule(jnp.float16), with_rule(jnp.float32)


def loss_fn(w, x):
    return jnp.mean(narrow_cube(x @ w))


def repaired(w, x):
    with jamp.autocast(enabled=False):
        return jnp.mean(wide_cube(x @ w))


def make():
    args = (normal(0, 32, 32, scale=0.1), normal(1, 16, 32))
    return Fault(loss_fn, args, "overflow", "convert_element_type", 1.0, repaired)
