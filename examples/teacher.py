"""The problem that the short examples share: learn what a random network computes."""

import jax
import jax.numpy as jnp

FEATURES, HIDDEN = 16, 64


def init(seed: int, outputs: int = 1) -> dict[str, jax.Array]:
    """Weights of a network with one hidden layer, in float32."""
    keys = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / FEATURES**0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(keys[1], (HIDDEN, outputs)) / HIDDEN**0.5,
        "b2": jnp.zeros(outputs),
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def batch(step: int, size: int = 64, outputs: int = 1) -> tuple[jax.Array, jax.Array]:
    """Inputs of a step, and what the teacher makes of them."""
    x = jax.random.normal(jax.random.key(1000 + step), (size, FEATURES))
    return x, predict(init(1, outputs), x)


def squared_error(prediction: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((prediction - y) ** 2)
