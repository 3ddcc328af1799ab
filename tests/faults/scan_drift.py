"""An integration that adds steps smaller than float16 can resolve."""

import jax

from . import Fault, normal


def advance(position, velocity):
    return position + 2e-4 * velocity  # FAULT


def trajectory(w, x, velocities):
    def step(position, velocity):
        return advance(position, velocity @ w), None

    return jax.lax.scan(step, x @ w, velocities)[0]


def make():
    args = (abs(normal(0, 16, 16)), abs(normal(1, 4, 16)), abs(normal(2, 500, 4, 16)))
    return Fault(trajectory, args, "precision", "add")
