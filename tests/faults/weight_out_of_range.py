"""A weight of 1e5, which float16 cannot hold."""

import jax.numpy as jnp

from . import Fault, normal


def head(w, h):
    return h @ w  # FAULT


def model(params, x):
    h = jnp.tanh(x @ params["w"])
    return head(params["head"], h) * 1e-3


def make():
    outlier = normal(1, 32, 8)
    outlier[5, 2] = 1e5
    params = {"w": normal(0, 16, 32), "head": outlier}
    args = (params, normal(2, 8, 16))
    return Fault(model, args, "overflow", "convert_element_type")
