"""Probabilities that float16 rounds to zero in a matmul, and then their logarithm."""

import jax
import jax.numpy as jnp

import jamp

from . import Fault, normal


def negative_log(p, labels, eps):
    p = jnp.take_along_axis(p, labels[:, None], -1)
    return -jnp.mean(jnp.log(p + eps))


def loss_fn(w, x, confusion, labels, eps):
    p = jax.nn.softmax(x @ w)  # FAULT
    noisy = p @ confusion
    return negative_log(noisy, labels, eps)


def repaired(w, x, confusion, labels, eps):
    p = jax.nn.softmax(x @ w)
    with jamp.autocast(enabled=False):
        noisy = p @ confusion
    return negative_log(noisy, labels, eps)


def make():
    w, x = normal(0, 16, 10, scale=2), normal(1, 64, 16, scale=1.5)
    args = (w, x, jnp.eye(10), jnp.arange(64) % 10, jnp.float32(1e-10))
    return Fault(loss_fn, args, "underflow", "div", repaired=repaired)
