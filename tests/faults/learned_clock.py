"""A phase of many radians in bfloat16: one gradient among larger ones is garbage."""

import jax.numpy as jnp
import numpy as np

from . import Fault, normal


def clock(time, frequency):
    return jnp.sin(time @ frequency)  # FAULT


def loss_fn(params, x, time, y):
    out = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return jnp.mean((out + 1e-3 * clock(time, params["frequency"]) - y) ** 2)


def make():
    params = {
        "w1": normal(0, 16, 32, scale=0.25),
        "w2": normal(1, 32, 4, scale=0.2),
        "frequency": normal(2, 2, 4),
    }
    time = np.stack([np.ones(64), np.linspace(0, 1000, 64)], -1).astype(np.float32)
    args = (params, normal(3, 64, 16), time, normal(4, 64, 4))
    return Fault(loss_fn, args, "precision", "dot_general", 1.0, dtype="bfloat16")
