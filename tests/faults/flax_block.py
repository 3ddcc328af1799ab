"""One block of a Flax model whose gate is a product of two large activations."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

import jamp

from . import Fault, normal


class Gate(nn.Module):
    repaired: bool

    @nn.compact
    def __call__(self, x):
        value, gate = nn.Dense(32, name="value")(x), nn.Dense(32, name="gate")(x)
        if self.repaired:
            with jamp.autocast(enabled=False):
                product = value * gate
        else:
            product = value * gate  # FAULT
        return nn.Dense(32, name="out")(product * 2**-10)


class Model(nn.Module):
    repaired: bool = False

    @nn.compact
    def __call__(self, x):
        for index in range(2):
            gate = Gate(self.repaired, name=f"gate_{index}")
            x = x + nn.LayerNorm()(gate(400 * x))
        return nn.Dense(4)(x)


def make():
    model = Model()
    x = normal(0, 8, 32)
    params = model.init(jax.random.key(0), x)

    def loss_of(model, params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    fn, repaired = partial(loss_of, model), partial(loss_of, Model(repaired=True))
    return Fault(fn, (params, x), "overflow", "mul", 1.0, repaired)
