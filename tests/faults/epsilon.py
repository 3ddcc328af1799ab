"""An epsilon, given as an argument, that float16 rounds to zero."""

import jax.numpy as jnp

from . import Fault, normal


def normalize(h, eps):
    peak = jnp.max(jnp.abs(h), axis=-1, keepdims=True)
    safe = peak + eps  # FAULT
    return h / safe


def model(w, x, eps):
    return normalize(x @ w, eps)


def make():
    x = normal(1, 8, 32)
    x[3] = 0  # padding
    args = (normal(0, 32, 32), x, jnp.float32(1e-8))
    return Fault(model, args, "underflow", "convert_element_type")
