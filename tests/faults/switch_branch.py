"""One of the branches of a switch cubes what comes in."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def cubic(h):
    return h * h * h * 2**-20  # FAULT


@jax.jit
def model(w, x, which):
    h = jax.lax.switch(which, [jnp.tanh, jax.nn.relu, cubic], x @ w)
    return 0.5 * (h @ w.T)


def make():
    args = (normal(0, 32, 16, scale=5), normal(1, 8, 32, scale=2), jnp.int32(2))
    return Fault(model, args, "overflow", "mul")
