"""Derivative rules in float64, which autocast leaves as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jaxprs import dtypes

import jamp


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


@jax.custom_jvp
def weighed(x, w):
    return jnp.exp(jnp.outer(x, x) @ w.astype(x.dtype))


@weighed.defjvp
def weighed_jvp(primals, tangents):
    return jax.jvp(weighed.fun, primals, tangents)


def along_an_ode(x, w):
    return odeint(
        lambda y, t, w: -(y * w).astype(y.dtype), x, jnp.linspace(0.0, 1.0, 3), w
    )


@pytest.mark.parametrize(
    "function", [lambda x, w: doubled(x) * doubled(w), weighed, along_an_ode]
)
@pytest.mark.parametrize(
    "dtypes", [("float64", "float64"), ("float32", "float64"), ("float64", "float32")]
)
def test_float64_has_its_gradients_through_rules(function, dtypes):
    with jax.enable_x64(True):
        arrays = [jnp.asarray([0.5, 1.5], dtype) for dtype in dtypes]

        def loss(x, w):
            return jnp.sum(function(x, w))

        plain = jax.grad(loss, (0, 1))(*arrays)
        cast = jax.grad(jamp.autocast(loss), (0, 1))(*arrays)
        for of_plain, of_cast in zip(plain, cast, strict=True):
            assert of_cast.dtype == of_plain.dtype
            np.testing.assert_allclose(of_cast, of_plain, rtol=0.01)


scaled = jax.custom_vjp(lambda x, scale: x * scale)


scaled.defvjp(
    lambda x, scale: (x * scale, (x, scale)),
    # JAX takes a gradient in float64 of a float32 operand as it is.
    lambda taken, ct: (ct * taken[1], jnp.sum(ct * taken[0])),
)


def test_a_float64_gradient_of_an_operand_in_float32_is_cast_to_its_dtype():
    with jax.enable_x64(True):
        x, w = (np.eye(2, dtype=np.float32) + k for k in range(2))

        def loss(x, w, scale):
            product = x @ w
            return jnp.sum(scaled(product, scale)) + jnp.sum(product)

        given = x, w, np.float64(3.0)
        found = jax.grad(jamp.autocast(loss), (0, 1, 2))(*given)
        assert dtypes(found) == ("float32", "float32", "float64")
        wanted = jax.grad(lambda x, w, s: jnp.sum(x @ w) * (s + 1), (0, 1, 2))(*given)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
