"""BatchNorm by hand: a variance as the difference of two large 16-bit numbers."""

import jax.numpy as jnp

from . import Fault, normal


def variance_of(h, mean):
    return jnp.mean(h * h, axis=0) - mean * mean  # FAULT


def batch_norm(h):
    mean = jnp.mean(h, axis=0)
    return (h - mean) / jnp.sqrt(variance_of(h, mean) + 1e-3)


def model(params, x):
    return batch_norm(x @ params["w"] + params["b"])


def make():
    params = {"w": normal(0, 32, 32, scale=0.5), "b": 64 + normal(1, 32)}
    return Fault(model, (params, normal(2, 256, 32)), "precision", "sub")
