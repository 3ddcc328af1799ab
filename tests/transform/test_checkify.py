"""`checkify` around a function under autocast sees what it sees in it as written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.extend.core.primitives import remat_p
from jaxprs import equations, traced

import jamp

X, W = np.ones((5, 6), np.float32), np.ones((6, 6), np.float32)
LOW = {
    "bfloat16": functools.partial(jamp.autocast, device_type="cpu"),
    "float16": functools.partial(jamp.autocast, device_type="gpu"),
}
both_dtypes = pytest.mark.parametrize("dtype", LOW)
EACH = {"under grad": jax.grad, "in jit": jax.jit, "plainly": lambda fn: fn}


def summed_and_picked(x, w, index):
    return jnp.exp(x @ w).sum(1)[index].sum()


def told(fn, errors, *args):
    """What is wrong, without the places that JAX adds."""
    error, _ = checkify.checkify(fn, errors=errors)(*map(jnp.asarray, args))
    return (error.get() or "").partition(" (")[0].split("\n")[0]


CHECKED = {
    "a NaN of a product": (checkify.nan_checks, lambda x, w: x @ w, X * np.inf, W - 1),
    "a NaN of a convolution": (
        checkify.nan_checks,
        lambda x, w: jax.lax.conv(x, w, (1,), "SAME"),
        *(np.full((1, 2, 3), np.inf, np.float32), np.zeros((2, 2, 1), np.float32)),
    ),
    "a division by zero": (
        checkify.div_checks,
        lambda x, w: (x @ w) / (x @ w * 0),
        *(X, W),
    ),
    "an index": (
        checkify.index_checks,
        lambda x, w: summed_and_picked(x, w, jnp.array([1, 9])),
        *(X, W),
    ),
    "an index in a checkpoint": (
        checkify.index_checks,
        jax.checkpoint(lambda x, w: jnp.sin(x @ w)[jnp.array([1, 9])]),
        *(X, W),
    ),
}


@both_dtypes
@pytest.mark.parametrize("name", CHECKED)
def test_an_error_is_told_as_of_the_function_as_written(name, dtype):
    errors, fn, *args = CHECKED[name]
    own = LOW[dtype](fn)
    assert told(own, errors, *args)
    if name != "an index in a checkpoint":  # JAX raises there as written
        assert told(own, errors, *args) == told(fn, errors, *args)


@both_dtypes
@pytest.mark.parametrize("within", EACH)
def test_what_is_fine_is_computed_as_without_checks(within, dtype):
    def loss(x):
        own = LOW[dtype](summed_and_picked)
        return own(x, W / 6, np.arange(5)).astype(jnp.float32) / x.mean()

    assert remat_p in [eqn.primitive for eqn in equations(traced(loss, X))]
    fn = EACH[within](loss)
    error, found = checkify.checkify(fn, errors=checkify.all_checks)(X)
    assert error.get() is None
    np.testing.assert_allclose(found, fn(X), rtol=0.01)
