"""An epsilon, given as an argument, that float16 rounds to zero before a matmul."""

import jax.numpy as jnp

from . import Fault, normal


def pool(seen, h, eps):
    weights = seen + eps  # FAULT
    return weights @ h / (weights @ jnp.ones((len(h), 1)))


def model(w, x, seen, eps):
    return pool(seen, x @ w, eps)


def make():
    seen = jnp.ones((4, 8)).at[2].set(0)  # of padding, nothing is seen
    args = (normal(0, 32, 16), normal(1, 8, 32), seen, jnp.float32(1e-8))
    return Fault(model, args, "underflow", "add")
