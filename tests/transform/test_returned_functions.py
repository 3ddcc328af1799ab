"""Functions that JAX makes inside autocast and that are called outside of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

X = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)
W = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def layer(x, w):
    return jnp.tanh(x @ w)


def pullback(x, w):
    return jax.vjp(layer, x, w)


def pushforward(x, w):
    return jax.linearize(lambda x: layer(x, w), x)


def transpose(x, w):
    return layer(x, w), jax.linear_transpose(lambda x: x @ (w * 2), x)


MADE = {"vjp": pullback, "linearize": pushforward, "linear_transpose": transpose}
TRANSFORMS = {"eager": lambda fn: fn, "jit": jax.jit}


def near(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MADE)
def test_a_function_made_inside_is_called_outside(name, transform, dtype):
    make = MADE[name]
    y, function = TRANSFORMS[transform](jamp.autocast(make, dtype=dtype))(X, W)
    assert y.dtype == dtype
    expected, made = make(X, W)
    taken = X if name == "linearize" else expected
    # In the dtype of what autocast returned, and in that of the program as written.
    near(function(taken.astype(dtype)), made(taken))
    near(function(taken), made(taken))
    near(jax.jit(lambda function: function(taken))(function), made(taken))


def test_a_function_made_inside_may_keep_a_random_key():
    def noisy(x, key):
        def scaled(x):
            return x * jax.lax.cond(x[0, 0] > 0, jax.random.normal, lambda k: 0.0, key)

        return jax.vjp(scaled, x)

    key = jax.random.key(0)
    y, function = jamp.autocast(noisy)(X, key)
    near(function(y), noisy(X, key)[1](y))


def test_a_function_of_jax_is_returned_as_it_is():
    assert jamp.autocast(lambda x: (x, jax.grad))(X)[1] is jax.grad


def test_a_gradient_flows_through_a_function_made_inside():
    def loss(x, transform):
        y, function = transform(pullback)(x, W)
        return jnp.sum(function(jnp.ones_like(y))[0] ** 2)

    near(jax.grad(loss)(X, jamp.autocast), jax.grad(loss)(X, lambda fn: fn))


def test_a_cast_of_the_results_leaves_a_function_made_inside_as_it_is():
    y, function = jamp.autocast(pullback, output_dtype="float16")(X, W)
    assert y.dtype == "float16"
    near(function(y), pullback(X, W)[1](layer(X, W)))


def test_what_a_function_made_inside_cannot_take_is_an_error_of_jax():
    _, function = jamp.autocast(pullback)(X, W)
    with pytest.raises(ValueError, match="VJP function"):
        function(jnp.ones((5, 5)))
    with pytest.raises(ValueError, match="VJP function"):
        function(jnp.ones((5, 5), "bfloat16"))


def test_a_partial_function_of_the_users_own_keeps_what_was_computed():
    partial = jax.tree_util.Partial
    double = jamp.autocast(lambda x, w: partial(jnp.add, x @ w))(X, W)
    assert isinstance(double, functools.partial)
    assert double(jnp.bfloat16(1)).dtype == "bfloat16"
