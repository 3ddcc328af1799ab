"""What programs are made of: random numbers, and networks of dense layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def normals(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(inputs: int, outputs: int, seed: int = 0) -> Array:
    return normals(inputs, outputs, seed=seed) / np.sqrt(inputs)


def apply(params: Any, x: Array, activation: Any = jax.nn.relu) -> Array:
    """The result of a network, given weights and bias of each layer."""
    for w, b in params[:-1]:
        x = activation(x @ w + b)
    w, b = params[-1]
    return x @ w + b
