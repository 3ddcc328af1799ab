"""Sums and their like that are asked for float32 of what is float32 as traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device

import jamp

x, w = np.eye(8, dtype=np.float32)[:4] + 1, np.eye(8, dtype=np.float32)
F32 = jnp.float32
ASKED = {
    "sum": lambda y, dtype: jnp.sum(y, 0, dtype=dtype),
    "sum, by position": lambda y, dtype: jnp.sum(y, 0, dtype),
    "method sum": lambda y, dtype: y.sum(0, dtype=dtype),
    "prod": lambda y, dtype: jnp.prod(y, 0, dtype=dtype),
    "mean": lambda y, dtype: jnp.mean(y, 0, dtype=dtype),
    "method mean": lambda y, dtype: y.mean(0, dtype),
    "var": lambda y, dtype: jnp.var(y, 0, dtype=dtype),
    "std": lambda y, dtype: jnp.std(y, 0, dtype=dtype),
    "cumsum": lambda y, dtype: jnp.cumsum(y, 0, dtype),
    "cumprod": lambda y, dtype: jnp.cumprod(y, 0, dtype=dtype),
    "cumulative_prod": lambda y, dtype: jnp.cumulative_prod(y, axis=0, dtype=dtype),
    "nansum": lambda y, dtype: jnp.nansum(a=y, axis=0, dtype=dtype),
    "nanmean": lambda y, dtype: jnp.nanmean(y, 0, dtype=dtype),
    "nanstd": lambda y, dtype: jnp.nanstd(y, 0, dtype=dtype),
    "trace": lambda y, dtype: jnp.trace(y[None] + y, axis1=1, axis2=2, dtype=dtype),
    "concatenate": lambda y, dtype: jnp.concatenate([y, y], dtype=dtype),
    "concatenate, an array": lambda y, dtype: jnp.concatenate(y, dtype=dtype),
    "stack": lambda y, dtype: jnp.stack([y, y], dtype=dtype),
    "hstack": lambda y, dtype: jnp.hstack([y, y], dtype=dtype),
    "vmap": lambda y, dtype: jax.vmap(lambda row: jnp.sum(row, dtype=dtype))(y),
    "jit": lambda y, dtype: jax.jit(lambda y: jnp.mean(y, 0, dtype=dtype))(y),
}
# Which torch's lists have in float32 in any case.
FLOAT32 = {
    "gpu": {name for name in ASKED if "sum" in name or "prod" in name} | {"vmap"},
    "cpu": {"prod", "trace"},
}


@each_device
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_float32_gives_it(name, device):
    def fn(x, w):
        y = x @ w
        return ASKED[name](y, F32), ASKED[name](y, None)

    asked, not_asked = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert asked.dtype == jnp.float32
    assert not_asked.dtype == (F32 if name in FLOAT32[device] else LOW[device])


@each_device
@pytest.mark.parametrize("spelling", ["float32", np.float32, np.dtype(np.float32)])
def test_a_dtype_may_be_spelled_as_for_numpy(spelling, device):
    fn = lambda x, w: jnp.mean(x @ w, 0, dtype=spelling)  # noqa: E731
    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert found.dtype == jnp.float32


@each_device
def test_functions_of_jax_that_the_user_jits_are_called_as_they_are(device):
    whole = jax.jit(jnp.sum, static_argnums=(1,), static_argnames=("dtype",))
    some = jax.jit(jnp.mean, static_argnums=(4,), static_argnames=("dtype", "axis"))

    def fn(x, w):
        y = x @ w
        return whole(y, 0, dtype=F32), some(y, axis=0, dtype=F32)

    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert {result.dtype for result in found} == {jnp.dtype(F32)}


@each_device
def test_a_function_of_jax_alone_is_asked_in_a_checkpoint(device):
    total = jax.checkpoint(functools.partial(jnp.sum, axis=0, dtype=F32))
    fn = lambda x, w: total(x @ w)  # noqa: E731
    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert found.dtype == jnp.float32


def test_wrong_arguments_are_for_jax_to_name():
    fn = lambda x, w: jnp.cumsum(x @ w, 0, unknown=1)  # noqa: E731
    with pytest.raises(TypeError, match=r"cumsum\(\) got an unexpected"):
        jamp.autocast(fn)(x, w)


def test_a_sum_in_float32_holds_what_overflows_float16():
    rows = np.full((2, 64), 30, np.float32)

    def fn(rows):
        y = rows @ jnp.eye(64)
        return jnp.sum(y**2, -1, dtype=F32), jnp.mean(450 * y, -1, dtype=F32) * 8

    found = jamp.autocast(fn, device_type="cpu", dtype=jnp.float16)(rows)
    np.testing.assert_allclose(found, fn(rows), rtol=1e-3)


def test_a_sum_that_a_checkpoint_gives_in_float32_is_not_rounded():
    @jax.checkpoint
    def norm(y):
        return jnp.sum(jnp.abs(y), -1, keepdims=True, dtype=F32)

    def fn(x):
        y = x @ jnp.eye(64)
        return y / norm(y)

    rows = np.full((2, 64), 2000, np.float32)  # their sum is more than float16 holds
    found = jamp.autocast(fn, device_type="cpu", dtype=jnp.float16)(rows)
    np.testing.assert_allclose(np.float32(found), 1 / 64, rtol=1e-3)


@each_device
def test_gradients_through_it_are_those_of_float32(device):
    fn = lambda w: (jnp.mean(x @ w, 0, dtype=F32) ** 2).sum()  # noqa: E731
    found = jax.grad(jamp.autocast(fn, device_type=device))(w)
    np.testing.assert_allclose(found, jax.grad(fn)(w), rtol=1e-2)
