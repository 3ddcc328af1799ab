"""Calls of jitted functions that are given arrays for good, in a program of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

X, W = np.full((2, 3), 0.5, np.float32), np.ones((3, 3), np.float32)
add = jax.jit(jnp.add, donate_argnums=0)


@pytest.mark.parametrize("inside", [lambda x: x, lambda x: x @ W], ids=["as", "cast"])
def test_what_is_given_away_is_gone(inside):
    step = jax.jit(lambda state, x: inside(state) + x, donate_argnums=0)
    state, x = jax.device_put((X, X))
    jamp.autocast(step)(state, x)
    assert state.is_deleted() and not x.is_deleted()


def test_a_constant_is_there_when_a_call_runs_again():
    fn = jamp.autocast(lambda x: add(X, x))
    for _ in range(2):
        np.testing.assert_array_equal(fn(X), 2 * X)


def used_before(h):
    return jnp.exp(h), add(h, 1.0)


def cast_twice(h):
    y = h.astype(jnp.bfloat16)
    return h.astype(jnp.bfloat16), add(y, y + 1)


@pytest.mark.parametrize("calls", [used_before, cast_twice])
def test_what_others_read_is_kept(calls):
    def fn(x, w):
        first, second = calls(x @ w)
        return first.sum(-1), second

    closing = jnp.ones(3)  # of such a function, no program is kept
    for called in (fn, lambda x, w: fn(x * closing, w)):
        results = jamp.autocast(called)(X, W)
        for found, expected in zip(results, called(X, W), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0.02)
