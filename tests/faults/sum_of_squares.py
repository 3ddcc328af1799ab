"""Energies of groups: squares of 16-bit values, which a matmul adds up."""

import jax.numpy as jnp

from . import Fault, normal


def energies(h, groups):
    squares = h * h  # FAULT
    return squares @ groups


def loss_fn(w, x, groups):
    h = x @ w
    return jnp.mean(energies(h, groups)) / x.size


def make():
    groups = jnp.repeat(jnp.eye(8), 8, axis=0) / 64
    args = (normal(0, 64, 64, scale=20), normal(1, 32, 64), groups)
    return Fault(loss_fn, args, "overflow", "mul", loss_scale=1.0)
