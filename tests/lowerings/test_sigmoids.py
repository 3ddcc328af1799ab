"""Sigmoids and tanh of 16 bits, and their gradients, are rounded once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax.test_util import check_grads

import jamp
from jamp._lowerings import sigmoids

FUNCTIONS = {
    "sigmoid": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x)), lambda y: y * (1 - y)),
    "tanh": (jnp.tanh, np.tanh, lambda y: 1 - y**2),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def cast(name, device):
    return jamp.autocast(FUNCTIONS[name][0], device_type=device, dtype=LOW[device])


def numbers(dtype):
    """All numbers of a 16-bit dtype between -32 and 32."""
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    every = jax.lax.bitcast_convert_type(bits, dtype)
    return every[jnp.abs(every.astype(jnp.float32)) < 32]


def exact(array):
    return np.asarray(array).astype(np.float64)


def assert_rounded_once(found, expected, least):
    """Whether numbers are those nearest to others, or next to ones halfway between."""
    dtype = found.dtype
    nearest = exact(jnp.asarray(expected, jnp.float32).astype(dtype))
    # XLA takes what is smaller than a normal number for zero.
    seen = np.abs(nearest) > least
    off = exact(found)[seen] != nearest[seen]
    assert np.mean(off) < 2e-3
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(exact(found)[seen], nearest[seen], rtol=spacing)


@each_device
@each_function
def test_values_are_those_of_float64_rounded_once(name, device):
    _, reference, _ = FUNCTIONS[name]
    x = numbers(LOW[device])
    least = float(jnp.finfo(x.dtype).tiny)
    assert_rounded_once(jax.jit(cast(name, device))(x), reference(exact(x)), least)


@each_device
@each_function
def test_gradients_are_those_of_the_rounded_value_rounded_once(name, device):
    """As PyTorch has them."""
    _, _, slope = FUNCTIONS[name]
    x = numbers(LOW[device])
    along = jnp.resize(jnp.linspace(0.5, 2, 1001).astype(x.dtype), x.shape)
    result, pullback = jax.vjp(jax.jit(cast(name, device)), x)
    (found,) = pullback(along)
    # Float32 itself rounds where the result is nearly one.
    assert_rounded_once(found, slope(exact(result)) * exact(along), 1e-4)


@each_device
@each_function
def test_the_backward_pass_keeps_16_bits(name, device):
    x = numbers(LOW[device])
    _, pullback = jax.vjp(cast(name, device), x)
    arrays = [a for a in jax.tree.leaves(pullback) if a.shape == x.shape]
    assert [a.dtype for a in arrays] == [x.dtype]


@each_device
@each_function
def test_small_numbers_of_both_signs_have_one_gradient(name, device):
    x = jnp.array([-2e-3, 2e-3], LOW[device])
    (negative, positive) = jax.vmap(jax.grad(cast(name, device)))(x)
    assert negative == positive


@pytest.mark.parametrize("known", sigmoids.OWN, ids=str)
def test_derivatives_to_the_second_order(known):
    own, jaxs = (
        functools.partial(primitive.bind, accuracy=None)
        for primitive in (sigmoids.OWN[known], known)
    )
    x = jnp.linspace(-2, 2, 7)
    check_grads(own, (x,), 2, atol=2e-2, rtol=2e-2)
    check_grads(jax.vmap(jax.vmap(own)), (x.reshape(7, 1),), 2, atol=2e-2, rtol=2e-2)
    hessians = (jax.vmap(jax.hessian(fn)) for fn in (own, jaxs))
    np.testing.assert_allclose(*(fn(x) for fn in hessians), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (4,)], ids=["a number", "an array"])
@each_device
@each_function
def test_gradients_of_a_tangent_that_all_examples_share_are_rounded_once(
    name, device, shape
):
    x = jax.random.normal(jax.random.key(0), (200, *shape), LOW[device])
    along = jnp.ones(shape, x.dtype)

    def slopes(fn):
        def total(along):
            _, tangents = jax.vmap(lambda x: jax.jvp(fn, (x,), (along,)))(x)
            return jnp.sum(tangents.astype(jnp.float32))

        return jax.grad(total)

    found = jax.jit(slopes(cast(name, device)))(along)
    assert found.dtype == x.dtype
    result = exact(jax.jit(cast(name, device))(x))
    expected = FUNCTIONS[name][2](result).sum(0)
    assert_rounded_once(found, expected, 0)
