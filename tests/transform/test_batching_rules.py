"""Functions with a batching rule of their own: `jax.custom_batching.custom_vmap`."""

import jax
import jax.numpy as jnp
import numpy as np

import jamp

X = jax.random.normal(jax.random.key(0), (4, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))


def test_a_batching_rule_may_leave_a_result_without_a_batch():
    @jax.custom_batching.custom_vmap
    def fn(x, w):
        return x @ w, 2 * w

    @fn.def_vmap
    def _(size, batched, x, w):
        return (x @ w, 2 * w), (True, False)

    # JAX refuses `None` for a result with a batch.
    axes = (0, None)
    rows, weight = jax.vmap(jamp.autocast(fn), axes, axes)(jnp.stack([X, X]), W)
    assert (rows.dtype, weight.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(rows, jnp.stack([jamp.autocast(fn)(X, W)[0]] * 2))
    np.testing.assert_array_equal(weight, 2 * W)


def test_tangents_alone_may_have_a_batch():
    @jax.custom_batching.custom_vmap
    def layer(w, x):
        return jnp.tanh(w @ x)

    @layer.def_vmap
    def _(size, batched, w, x):
        return jnp.tanh(w @ x), any(batched)

    x = X[0]
    actual = jax.jacfwd(jamp.autocast(layer), 1)(W, x)
    np.testing.assert_allclose(actual, jax.jacfwd(layer, 1)(W, x), atol=0.02)


def test_a_batching_rule_gets_python_numbers_that_promote_as_such():
    @jax.custom_batching.custom_vmap
    def scaled(x, factor):
        return x * factor

    @scaled.def_vmap
    def _(size, batched, x, factor):
        assert jax.typeof(factor).weak_type
        return x * factor, True

    result = jax.vmap(jamp.autocast(lambda x: scaled(x, 2.0)))(X)
    np.testing.assert_array_equal(result, 2 * X)
