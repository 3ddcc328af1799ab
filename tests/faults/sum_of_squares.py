"""An energy written as a product of a 16-bit value with itself."""

import jax.numpy as jnp

from . import Fault, normal


def energy(h):
    squares = h * h  # FAULT
    return jnp.sum(squares)


def loss_fn(w, x):
    h = x @ w
    return energy(h) / x.size


def make():
    args = (normal(0, 64, 64, scale=20), normal(1, 32, 64))
    return Fault(loss_fn, args, "overflow", "mul", loss_scale=1.0)
