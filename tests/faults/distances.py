"""Squared distances as differences of large numbers, one of them from a matmul."""

import jax.numpy as jnp

import jamp

from . import Fault, normal


def kernel(x, centers, weights):
    sizes = jnp.sum(x**2, -1)[:, None] + jnp.sum(centers**2, -1)
    products = x @ centers.T  # FAULT
    return jnp.exp(-0.5 * (sizes - 2 * products)) @ weights


def repaired(x, centers, weights):
    sizes = jnp.sum(x**2, -1)[:, None] + jnp.sum(centers**2, -1)
    with jamp.autocast(enabled=False):
        products = x @ centers.T
    return jnp.exp(-0.5 * (sizes - 2 * products)) @ weights


def make():
    x = 5 + normal(0, 32, 8)
    centers = x[:20] + normal(1, 20, 8, scale=0.3)
    args = (x, centers, normal(2, 20, 4))
    return Fault(kernel, args, "precision", "dot_general", repaired=repaired)
