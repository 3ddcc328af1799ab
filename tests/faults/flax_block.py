"""One block of a Flax model whose gate is a product of two large activations."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from . import Fault, normal


class Gate(nn.Module):
    @nn.compact
    def __call__(self, x):
        value, gate = nn.Dense(32, name="value")(x), nn.Dense(32, name="gate")(x)
        return value * gate  # FAULT


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = x + nn.LayerNorm()(Gate(name=f"gate_{index}")(400 * x))
        return nn.Dense(4)(x)


def make():
    model = Model()
    x = normal(0, 8, 32)
    params = model.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    return Fault(loss_fn, (params, x), "overflow", "mul", loss_scale=1.0)
