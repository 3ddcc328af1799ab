"""A loss scale that is too large for the gradients."""

import jax.numpy as jnp

from . import Fault, normal


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["w1"])
    out = h @ params["w2"]
    error = (out - y).astype(jnp.float32)  # FAULT
    return jnp.mean(error**2)


def make():
    params = {"w1": normal(0, 16, 64, scale=0.2), "w2": normal(1, 64, 8, scale=0.1)}
    args = (params, normal(2, 128, 16), normal(3, 128, 8))
    operation = "convert_element_type"
    return Fault(loss_fn, args, "overflow", operation, loss_scale=2.0**30)
