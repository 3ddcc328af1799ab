"""Embeddings multiplied by a large factor before they enter a matmul."""

import jax.numpy as jnp

from . import Fault, normal


def project(w, h):
    return h @ w


def model(params, tokens):
    h = params["table"][tokens] * 1e5  # FAULT
    return jnp.tanh(project(params["w"], h) * 1e-5)


def make():
    params = {"table": normal(0, 32, 16), "w": normal(1, 16, 16)}
    tokens = jnp.arange(24) % 32
    return Fault(model, (params, tokens), "overflow", "mul")
