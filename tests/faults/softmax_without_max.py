"""A softmax that divides last, so that its exponentials enter a matmul unscaled."""

import jax.numpy as jnp

from . import Fault, normal


def mix(logits, v):
    weights = jnp.exp(logits)  # FAULT
    return weights @ v / weights.sum(-1, keepdims=True)


def attention(params, x):
    q, k = x @ params["q"], x @ params["k"]
    return mix(q @ k.T, x)


def make():
    params = {"q": normal(0, 32, 32, scale=0.3), "k": normal(1, 32, 32, scale=0.3)}
    args = (params, normal(2, 16, 32))
    return Fault(attention, args, "overflow", "exp")
