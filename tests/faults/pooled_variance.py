"""A variance pooled by attention, as the difference of two large 16-bit products."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def spread(weights, h):
    mean = weights @ h
    variance = weights @ (h * h) - mean * mean  # FAULT
    return jnp.sqrt(jax.nn.relu(variance) + 1e-3)


def model(params, x):
    h = x @ params["w"]
    weights = jax.nn.softmax((h @ params["query"]).T)
    return spread(weights, h)


def make():
    params = {"w": normal(0, 32, 16, scale=0.5), "query": normal(1, 16, 4, scale=0.01)}
    params["w"][0] = 64
    x = normal(2, 64, 32)
    x[:, 0] = 1
    return Fault(model, (params, x), "precision", "sub")
