"""Cross entropy of logits in the thousands: bfloat16 has no digits for what differs."""

import jax.numpy as jnp

from . import Fault, normal


def head(w, h):
    ones = jnp.ones((len(h), 1))
    return jnp.concatenate([h, ones], axis=1) @ w  # FAULT


def loss_fn(params, x, y):
    logits = head(params["w2"], jnp.tanh(x @ params["w1"]))
    peak = jnp.max(logits, -1, keepdims=True)
    total = peak[:, 0] + jnp.log(jnp.sum(jnp.exp(logits - peak), -1))
    return jnp.mean(total - jnp.take_along_axis(logits, y[:, None], -1)[:, 0])


def make():
    params = {"w1": normal(0, 16, 32), "w2": normal(1, 33, 10, scale=0.4)}
    params["w2"][-1] = 2000  # the bias
    args = (params, normal(3, 32, 16), jnp.arange(32) % 10)
    return Fault(loss_fn, args, "precision", "dot_general", dtype="bfloat16")
