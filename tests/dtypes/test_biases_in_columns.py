"""Products and their addends, read by columns: which of these are biases."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

X, W, BIAS, COLUMNS = (8, 6), (6, 4), (4,), (8,)


def by_columns(x, w, bias):
    return (x @ w).reshape(4, 2, 4, order="F") + bias


def turned(x, w, bias):
    return lax.reshape(x @ w, (4, 8), (1, 0)) + bias[:, None]


def repeated_by_columns(x, w, bias):
    return x @ w + jnp.broadcast_to(bias, (2, 4, 4)).reshape(8, 4, order="F")


def columns_of_others(x, w, columns):
    """It differs from row to row and along each."""
    return x @ w + jnp.broadcast_to(columns, (4, 8)).reshape(8, 4, order="F")


def dtype_of(fn, added, device):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, W, added)]
    return jax.eval_shape(jamp.autocast(fn, device_type=device), *arguments).dtype


@pytest.mark.parametrize("fn", [by_columns, turned, repeated_by_columns])
@pytest.mark.parametrize("device, dtype", [("gpu", "float16"), ("cpu", "bfloat16")])
def test_a_bias_is_part_of_its_product(fn, device, dtype):
    assert dtype_of(fn, BIAS, device) == dtype


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_what_is_no_bias_promotes(device):
    assert dtype_of(columns_of_others, COLUMNS, device) == "float32"
