"""What a function returns beside its gradient has the dtype that it has without.

Of what is differentiated under autocast JAX computes first, by itself, what is known
before: constants, masks and the parts of functions that are made of these. They follow
what they meet there as they do where they stand in the function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import each_device
from jax import lax

import jamp

SHAPE = (4, 16)
ACTIVATIONS = (jax.nn.elu, jax.nn.selu, jax.nn.log_sigmoid, jax.nn.mish, jax.nn.silu)
CONSTANTS = {
    "a number": lambda: jnp.full(SHAPE, 2.0),
    "a triangle": lambda: jnp.tril(jnp.ones(SHAPE)),
    "one hot": lambda: jax.nn.one_hot(jnp.arange(4), 16),
    "dropout": lambda: 1.25 * jax.random.bernoulli(jax.random.key(0), 0.8, SHAPE),
}
LAYERS = {
    **{activation.__name__: activation for activation in ACTIVATIONS},
    "entr": jax.scipy.special.entr,
    "variance": lambda x: x / (1 + jnp.var(x, axis=-1, keepdims=True)),
    **{
        name: lambda x, constant=constant: x * constant()
        for name, constant in CONSTANTS.items()
    },
}


def scanned(layer):
    return lambda x: lax.scan(lambda h, _: (layer(h), None), x, None, length=2)[0]


def saving_all(layer):
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.everything_saveable)


WAYS = {
    "scan": scanned,
    "checkpoint": saving_all,
    "scan of a checkpoint": lambda layer: scanned(saving_all(layer)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("function", LAYERS.values(), ids=LAYERS)
@each_device
def test_a_result_has_the_same_dtype_beside_a_gradient(function, way, device):
    def fn(w, x):
        result = way(lambda h: function(h @ w))(x)
        return jnp.sum(result), result

    arguments = np.ones((16, 16), np.float32), np.ones(SHAPE, np.float32)
    _, alone = jax.eval_shape(jamp.autocast(fn, device_type=device), *arguments)
    both = jamp.autocast(jax.value_and_grad(fn, has_aux=True), device_type=device)
    (_, beside), _ = jax.eval_shape(both, *arguments)
    assert beside.dtype == alone.dtype
