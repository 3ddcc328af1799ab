"""On CPUs, layers whose product is too large for float32, and what reads them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import program_figures

import jamp


def large_layer():
    """A layer with too many numbers for a float32 product, and a far bias."""
    layer, x = nn.Dense(4096), jax.random.normal(jax.random.key(0), (1040, 8))
    params = layer.init(jax.random.key(1), x)["params"]
    return layer, {**params, "bias": params["bias"] + 256}, x


def losses(layer, params, x):
    scores = layer.apply({"params": params}, x)
    labels = jnp.arange(len(x)) % 4096
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels), scores


def test_readers_in_float32_of_a_large_layer_have_its_bias_unrounded():
    layer, params, x = large_layer()
    own = jamp.autocast(lambda *args: losses(layer, *args)[0], device_type="cpu")
    found, _ = jax.jit(functools.partial(jax.vjp, own))(params, x)
    expected, _ = losses(layer, params, x)
    np.testing.assert_allclose(found, expected, atol=0.03, rtol=0)


def test_the_backward_pass_keeps_one_array_of_a_large_layer():
    layer, params, x = large_layer()

    def loss(params, x):
        return losses(layer, params, x)[0].mean(), None

    fn = jamp.autocast(loss, device_type="cpu")
    kept = program_figures.saved_for_backward(fn, params, x)
    assert [r.dtype for r in kept if r.shape == (1040, 4096)] == [jnp.bfloat16]


def test_other_readers_of_a_large_layer_have_its_16_bits():
    layer, params, x = large_layer()
    own = jamp.autocast(functools.partial(losses, layer), device_type="cpu")
    _, scores = jax.jit(own)(params, x)
    _, expected = losses(layer, params, x)
    assert scores.dtype == jnp.bfloat16
    np.testing.assert_allclose(scores.astype(jnp.float32), expected, atol=1.1)
