"""A moving average whose steps are smaller than float16 can resolve."""

import jax

from . import Fault, normal


def advance(average, value):
    return 0.9995 * average + 0.0005 * value  # FAULT


def trajectory(w, x, values):
    def step(average, value):
        return advance(average, value @ w), None

    return jax.lax.scan(step, x @ w, values)[0]


def make():
    args = (abs(normal(0, 16, 16)), abs(normal(1, 4, 16)), abs(normal(2, 500, 4, 16)))
    return Fault(trajectory, args, "precision", "mul")
