"""Products in float32 on CPUs, of operands that were rounded for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processors import processor_with
from products import cast

import jamp

RNG = np.random.default_rng(0)
X, Y, Z = (RNG.normal(size=shape).astype("f") for shape in ((64, 32), (64, 9, 32), 64))
W = RNG.normal(size=(32, 48)).astype("f")
LOW = jnp.bfloat16


def scores(x, y):
    """Products of a row and a few, which are in float32 on every processor."""
    return jnp.einsum("bd,bnd->bn", x * 1.7, jnp.sin(y))


def layer(x, w):
    return jnp.tanh(x) @ jnp.cos(w)


PRODUCTS = {
    "rows of a stack, with instructions": ("avx512_bf16", scores, (X, Y)),
    "rows of a stack, with AMX": ("amx_bf16", scores, (X, Y)),
    "rows of a stack, without instructions": ("old", scores, (X, Y)),
    "a layer, without instructions": ("old", layer, (X, W)),
    "a layer, with instructions as slow": ("held back", layer, (X, W)),
    "a vmapped row": (
        "avx512_bf16",
        jax.vmap(lambda x, y: jnp.tanh(y) @ jnp.tanh(x)),
        (X, Y),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_float32_reads_operands_as_they_were(name, tmp_path):
    processor, fn, arrays = PRODUCTS[name]
    with processor_with(processor, tmp_path):
        found = jax.jit(cast(fn))(*arrays)
    np.testing.assert_array_equal(found, jax.jit(fn)(*arrays).astype(LOW))


SAVED = {
    "as it was, of little where products gain": ("avx512_bf16", jnp.float32),
    "in 16 bits where products are in float32": ("old", LOW),
}


@pytest.mark.parametrize("saved", SAVED)
def test_a_gradient_in_float32_reads_what_was_saved(saved, tmp_path):
    processor, dtype = SAVED[saved]

    def loss(x, y):
        return jnp.sum(jnp.einsum("bd,bnd->bn", 2 * x, 2 * y) * Z[:, None])

    with processor_with(processor, tmp_path):
        found = jax.jit(jax.grad(cast(loss)))(X, Y)
    y = (2 * Y).astype(dtype).astype(jnp.float32)
    expected = jnp.einsum("bn,bnd->bd", jnp.repeat(Z[:, None], 9, 1), y)
    np.testing.assert_array_equal(found, 2 * expected.astype(LOW).astype(jnp.float32))


@pytest.mark.parametrize("processor", ["avx512_bf16", "old"])
def test_what_the_program_rounded_is_read_rounded(processor, tmp_path):
    """An operand in two parts: the second is what rounding lost of the first."""

    def in_parts(x, y):
        x, y = jnp.tanh(x), jnp.sin(y)
        high = x.astype(LOW)
        low = (x - high).astype(LOW)
        two = [
            jnp.einsum("bd,bnd->bn", part.astype(jnp.float32), y.astype(LOW))
            for part in (high, low)
        ]
        return two[0].astype(jnp.float32), two[1].astype(jnp.float32)

    with processor_with(processor, tmp_path):
        high, low = jax.jit(cast(in_parts))(X, Y)
    x, y = jnp.tanh(X), jnp.sin(Y).astype(LOW).astype(jnp.float32)
    rounded = x.astype(LOW).astype(jnp.float32)
    for found, part in ((high, rounded), (low, (x - rounded).astype(LOW))):
        expected = jnp.einsum("bd,bnd->bn", part.astype(jnp.float32), y)
        np.testing.assert_array_equal(found, expected.astype(LOW))


@jax.custom_vjp
def whole_gradients(y):
    return y


def to_whole(_, gradient):
    return (gradient.astype("float32").astype(jnp.int8).astype(gradient.dtype),)


whole_gradients.defvjp(lambda y: (y, None), to_whole)


@pytest.mark.parametrize(
    ("between", "factor", "expected"),
    [
        pytest.param(whole_gradients, 1.8, 1.0, id="int8"),
        pytest.param(lambda y: y.astype(jnp.float8_e4m3fn), 1e3, np.nan, id="float8"),
    ],
)
def test_a_gradient_that_the_program_cast_is_read_as_it_cast_it(
    between, factor, expected, amx
):
    def loss(w, x, factors):
        return jnp.sum(between(x @ w).astype(jnp.float32) * factors)

    w, x = jnp.ones((4, 4), LOW), jnp.ones((1, 4), LOW)
    gradient = jax.jit(jax.grad(cast(loss)))(w, x, jnp.full((1, 4), factor))
    found = gradient.astype(jnp.float32)  # NumPy knows no NaN of bfloat16
    np.testing.assert_array_equal(found, np.full((4, 4), expected))


def test_float16_overflows_before_a_product(tmp_path):
    fn = jamp.autocast(lambda x, y: scores(x * 1e5, y * 1e-5), dtype="float16")
    with processor_with("avx512_bf16", tmp_path), pytest.warns(jamp.JampWarning):
        found = jax.jit(fn)(jnp.ones_like(X), jnp.ones_like(Y))
    assert np.isinf(found).all()


def test_what_a_loop_carries_is_read_as_it_was(tmp_path):
    x = np.rint(X)  # What enters the loop is rounded outside of it.

    def sums(tokens):
        def step(total, token):
            total = total + token
            return total, jnp.einsum("bd,bnd->bn", x, total)

        return jax.lax.scan(step, Y, tokens)[1]

    tokens = np.stack([Y, 2 * Y, 3 * Y])
    with processor_with("avx512_bf16", tmp_path):
        found = jax.jit(cast(sums))(tokens)
    np.testing.assert_array_equal(found, jax.jit(sums)(tokens).astype(LOW))
