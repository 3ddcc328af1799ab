"""A decay whose steps are smaller than float16 can resolve."""

import jax

from . import Fault, normal


def advance(level, rate):
    return level * (1 - 2e-5 * rate)  # FAULT


def trajectory(w, x, rates):
    def step(level, rate):
        return advance(level, rate @ w), None

    return jax.lax.scan(step, x @ w, rates)[0]


def make():
    args = (abs(normal(0, 16, 16)), abs(normal(1, 4, 16)), abs(normal(2, 500, 4, 16)))
    return Fault(trajectory, args, "precision", "mul")
