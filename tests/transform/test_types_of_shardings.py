"""Gradients have the types that JAX gives them where shardings are part of types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import jamp

TOLERANCE = {"cpu": 2e-2, "gpu": 2e-3}


def product(w, x):
    return jnp.mean((x @ w) ** 2)


def reduced(w):
    return jax.sharding.reshard(w, P(None, None, reduced={"i"}))


@pytest.mark.parametrize("device", TOLERANCE)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "from outside"])
def test_the_gradient_of_a_weight_that_is_added_up_once_for_all_devices(inside, device):
    def loss(w, x):
        return product(reduced(w) if inside else w, x)

    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))):
        keys = jax.random.split(jax.random.key(0))
        w = jax.device_put(jax.random.normal(keys[0], (16, 24)), P())
        x = jax.device_put(jax.random.normal(keys[1], (8, 16)), P("i"))
        w = w if inside else reduced(w)
        expected = jax.grad(loss)(w, x)
        found = jax.grad(jamp.autocast(loss, device_type=device))(w, x)
        assert jax.typeof(found) == jax.typeof(expected)
        found, expected = (
            jax.sharding.reshard(grad, P(None, None)) for grad in (found, expected)
        )
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[device]


ON_NO_MESH = {
    "rows": ((16, 24), (8, 16)),
    "stacks of rows": ((16, 24), (8, 4, 16)),
}


@pytest.mark.parametrize("device", TOLERANCE)
@pytest.mark.parametrize("name", ON_NO_MESH)
def test_the_gradient_of_a_weight_that_is_on_no_mesh(name, device):
    rng = np.random.default_rng(0)
    w, x = (jnp.float32(rng.standard_normal(shape)) for shape in ON_NO_MESH[name])
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))):
        x = jax.device_put(x, P("i"))
        expected = jax.jit(jax.grad(product))(w, x)
        found = jax.jit(jax.grad(jamp.autocast(product, device_type=device)))(w, x)
        assert jax.typeof(found) == jax.typeof(expected)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[device]
