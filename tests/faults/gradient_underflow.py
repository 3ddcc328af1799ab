"""Training in float16 without loss scaling: small gradients become zero."""

import jax.numpy as jnp

from . import Fault, normal


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["w1"])
    out = h @ params["w2"]
    error = (out - y).astype(jnp.float32)  # FAULT
    return 1e-5 * jnp.mean(error**2)


def make():
    params = {"w1": normal(0, 16, 64, scale=0.2), "w2": normal(1, 64, 8, scale=0.1)}
    args = (params, normal(2, 128, 16), normal(3, 128, 8))
    operation = "convert_element_type"
    return Fault(loss_fn, args, "underflow", operation, loss_scale=1.0)
