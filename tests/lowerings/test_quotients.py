"""Quotients of float16, and their gradients, are right wherever float16 holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp

EYE = np.eye(8, dtype=np.float32)
SIZES = [1e-3, 0.1, 1.0, 200.0, 1000.0, 5000.0, 20_000.0]


def drawn(seed, size, shape=(4, 8)):
    """Numbers of float16, in float32."""
    found = np.random.default_rng(seed).uniform(1, 2, shape) * size
    return found.astype(np.float16).astype(np.float32)


def softsign_like(x, y):
    return x / (jnp.abs(y) + 1)


QUOTIENTS = {
    "quotient": lambda x, y: x / y,
    "read in 16 bits": lambda x, y: (x / y) @ EYE,
    "rows": lambda x, y: x / y[:, :1],
    "a row": lambda x, y: x[0] / y,
    "softsign": softsign_like,
    "under a mask": lambda x, y: jnp.where(y > y[0], x / y, 0),
    "in a jit": lambda x, y: jax.jit(jnp.divide)(x, y),
    "checkpointed": lambda x, y: jax.checkpoint(jnp.divide)(x, y),
    "in a loop": lambda x, y: lax.scan(lambda c, r: (c, r[0] / r[1]), 0, (x, y))[1],
}


def quotient_of_products(fn, transform=lambda fn: fn):
    """The function of what two products give, times a scale that float16 asks for."""

    def loss(x, y):
        result = fn(x @ EYE, y @ EYE).astype(jnp.float32)
        return jnp.sum(result * np.linspace(1, 2, result.shape[-1]))

    return transform(loss)


def gpu(fn):
    return jamp.autocast(fn, device_type="gpu")


ROUNDED_ONCE = {
    "elements": jnp.divide,
    "by a column": lambda x, y: x / y[:, :1],
    "by a row": lambda x, y: x / y[0],
    "by a number": lambda x, y: x / jnp.float16(2e-6),
    "a batch": jax.vmap(lambda x, y: x / y[0]),
    "a tangent": lambda x, y: jax.jvp(lambda x: x / y[:, :1], (x,), (x,))[1],
}


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1.0, 30_000.0])
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_a_quotient_is_that_of_float32_rounded_once(name, size):
    fn, x, y = ROUNDED_ONCE[name], drawn(0, size), drawn(1, size)
    cast = gpu(lambda x, y: fn(x @ EYE, y @ EYE))
    expected = jnp.asarray(fn(x, y)).astype(jnp.float16)
    for run in (jax.jit(cast), cast):
        found = run(x, y)
        assert found.dtype == jnp.float16
        np.testing.assert_array_equal(found, expected)


@pytest.mark.numbers
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_both_gradients_are_those_of_float32(name, size):
    fn, arguments = QUOTIENTS[name], (drawn(0, size), drawn(1, size))

    def gradients(transform):
        loss = quotient_of_products(fn, transform)
        return jax.grad(loss, (0, 1))

    scale = 2.0**10 if size > 1 else 1.0  # of the loss, for what float16 holds
    scaled = lambda fn: gpu(lambda *xs: fn(*xs) * scale)  # noqa: E731
    expected = gradients(lambda fn: fn)(*arguments)
    for run in (jax.jit(gradients(scaled)), gradients(scaled)):
        for found, wanted in zip(run(*arguments), expected, strict=True):
            limit = 4e-3 * np.abs(wanted).max()
            np.testing.assert_allclose(found / scale, wanted, atol=limit)


def test_a_gradient_of_zero_stays_zero_where_the_slope_is_out_of_range():
    x, y = drawn(0, 60.0), drawn(1, 1e-3)
    loss = gpu(lambda x, y: jnp.sum(((x @ EYE) / (y @ EYE))[:2]))
    assert not jax.jit(jax.grad(loss, 1))(x, y)[2:].any()


TRANSFORMS = {
    "a tangent": lambda fn, x, y: jax.jvp(fn, (x, y), (x, y))[1],
    "one tangent": lambda fn, x, y: jax.jvp(lambda y: fn(x, y), (y,), (x,))[1],
    "a batch": lambda fn, x, y: jax.vmap(jax.grad(fn, 1))(x[None], y[None]),
    "second derivatives": lambda fn, x, y: jax.grad(
        lambda y: jnp.sum(jax.grad(fn, 1)(x, y))
    )(y),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_other_derivatives_are_those_of_float32(name):
    transform, arguments = TRANSFORMS[name], (drawn(0, 30.0), drawn(1, 30.0))
    found, expected = (
        jax.jit(
            lambda *xs, cast=cast: transform(
                quotient_of_products(jnp.divide, cast), *xs
            )
        )(*arguments)
        for cast in (gpu, lambda fn: fn)
    )
    limit = 4e-3 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=limit)
