"""Attention whose queries and keys have grown: their products leave float16's range."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def scores(q, k):
    return jnp.einsum("qd,kd->qk", q, k)  # FAULT


def attention(params, x):
    q, k, v = x @ params["q"], x @ params["k"], x @ params["v"]
    return jax.nn.softmax(scores(q, k) / 4096) @ v


def make():
    params = {
        "q": normal(0, 32, 64, scale=15),
        "k": normal(1, 32, 64, scale=15),
        "v": normal(2, 32, 64, scale=0.1),
    }
    return Fault(attention, (params, normal(3, 16, 32)), "overflow", "dot_general")
