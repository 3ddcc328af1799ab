"""Phases of many radians in bfloat16, seen to be wrong in the loop that reads them."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def phases(x, w):
    return x @ w  # FAULT


def model(params, x):
    def step(h, phase):
        return 0.9 * h + jnp.sin(phase), None

    angles = phases(x, params["frequencies"])
    h, _ = jax.lax.scan(step, jnp.zeros(angles.shape[1]), angles)
    return jnp.tanh(h @ params["w"])


def make():
    params = {"frequencies": normal(0, 4, 16, scale=300), "w": normal(1, 16, 3)}
    args = (params, abs(normal(2, 50, 4)))
    return Fault(model, args, "precision", "dot_general", dtype="bfloat16")
