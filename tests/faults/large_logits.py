"""Cross entropy of logits in the thousands: bfloat16 has no digits for what differs."""

import jax.numpy as jnp

from . import Fault, normal


def head(params, h):
    return h @ params["w2"] + params["b"]  # FAULT


def loss_fn(params, x, y):
    logits = head(params, jnp.tanh(x @ params["w1"]))
    peak = jnp.max(logits, -1, keepdims=True)
    total = peak[:, 0] + jnp.log(jnp.sum(jnp.exp(logits - peak), -1))
    return jnp.mean(total - jnp.take_along_axis(logits, y[:, None], -1)[:, 0])


def make():
    params = {
        "w1": normal(0, 16, 32),
        "w2": normal(1, 32, 10, scale=0.4),
        "b": 2000 + normal(2, 10, scale=0),
    }
    args = (params, normal(3, 32, 16), jnp.arange(32) % 10)
    return Fault(loss_fn, args, "precision", "add", dtype="bfloat16")
