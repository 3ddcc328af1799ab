"""What activations with numbers in them give to reductions, on CPUs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp


def pooled(x):
    pictures = x.reshape(-1, 16, 16, x.shape[-1])
    return nn.avg_pool(pictures, (2, 2), (2, 2)).reshape(-1, x.shape[-1])


REDUCTIONS = {
    "mean": lambda h: h.reshape(32, 128, -1).mean(1),
    "one in four": lambda h: h.reshape(-1, 4, h.shape[-1]).sum(1),
    "avg_pool": pooled,
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_the_numbers_of_an_activation_are_not_arrays_where_a_reduction_reads_it(
    name, reduction
):
    def loss(first, second, x):
        return jnp.sum(REDUCTIONS[reduction](getattr(jax.nn, name)(x @ first)) @ second)

    def memory(fn):
        shapes = [(64, 256), (256, 8), (4096, 64)]
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.value_and_grad(fn)).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(jamp.autocast(loss, device_type="cpu")) < 1.2 * memory(loss)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 2.0**127, -0.0])
def test_what_an_activation_gives_a_reduction_is_any_number(number):
    def loss(x, w):
        h = x @ w
        return jnp.sum(jnp.tanh(h) * 0.5 + h, axis=1)

    x, w = jnp.full((4, 2), number / 2, jnp.float32), jnp.ones((2, 1))
    fn = jamp.autocast(loss, device_type="cpu")
    run = jax.jit(lambda *args: jax.vjp(fn, *args)[0])
    assert "mantissa_bits=24" in str(run.trace(x, w).jaxpr)
    # NumPy knows NaN of float32 alone.
    found = run(x, w)
    expected = loss(x, w).astype(found.dtype).astype(jnp.float32)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected)


def test_a_linear_function_with_numbers_in_it_has_a_transpose():
    w = jnp.float32(np.random.default_rng(0).uniform(0.1, 1, (32, 128)))
    fn = jamp.autocast(
        lambda x: jnp.sum(x @ w * 0.5 + x @ w, axis=1), device_type="cpu"
    )
    x = jnp.ones((64, 32))
    ones = jnp.ones(64, jnp.bfloat16)
    (transposed,) = jax.linear_transpose(fn, x)(ones)
    np.testing.assert_allclose(transposed, 1.5 * w.sum(1) * x, rtol=0.02)
