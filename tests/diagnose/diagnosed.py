"""A function whose products overflow float16, and what most tests of diagnoses call."""

import inspect

import jax.numpy as jnp
import numpy as np

import jamp

X = np.linspace(1, 300, 64, dtype=np.float32).reshape(8, 8)
EYE = np.eye(8, dtype=np.float32)


def diagnose(fn, **options):
    return jamp.diagnose(fn, device_type="gpu", progress=False, **options)


def product(x):
    """The argument as a matmul gives it: in 16 bits."""
    return x @ EYE


def square(x):
    return x * x


def mean(h):
    """The mean of what a matmul reads, and with it all in front of it, in 16 bits."""
    return jnp.mean(product(h * 2**-7))


def line_of(fn):
    """The line of the first return of a function."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if "return" in line)
