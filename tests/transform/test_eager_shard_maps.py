"""Functions with derivative rules in a jax.shard_map that runs op by op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh, normal
from jax import P
from test_construct_matrix import TOLERANCE, cast, error


def over_rows(fn):
    return jax.shard_map(fn, in_specs=(P("i"), P()), out_specs=P("i"))


def doubled_sine(added):
    """A product whose rule doubles the gradient."""
    doubled = jax.custom_vjp(lambda x, w: jnp.sin(x + added) @ w)
    doubled.defvjp(
        lambda x, w: (doubled(x, w), (x, w)),
        lambda kept, g: (2 * jnp.cos(kept[0] + added) * (g @ kept[1].T), None),
    )
    return doubled


added = pytest.mark.parametrize(
    "added", [0.0, np.ones(4, np.float32), jnp.ones(4)], ids=type
)


@added
def test_it_may_stand_in_a_function_under_autocast(added):
    x, w, doubled = normal(8, 4), normal(4, 4), doubled_sine(added)
    fn = cast(over_rows(doubled), "gpu")

    def total(x):
        # No gradient comes through the first.
        return jnp.sum(fn(x, w).astype(jnp.float32) + fn(jnp.zeros_like(x), w))

    with jax.set_mesh(mesh()):
        batch = jax.vmap(fn, (0, None))(jnp.stack([x, 2 * x]), w)
        actual, gradient = fn(x, w), jax.grad(total)(x)
    assert actual.dtype == jnp.float16
    assert error(actual, doubled(x, w)) < TOLERANCE["gpu"]
    assert error(batch[1], doubled(2 * x, w)) < TOLERANCE["gpu"]
    expected = jax.grad(lambda x: jnp.sum(doubled(x, w)))(x)
    assert error(gradient, expected) < TOLERANCE["gpu"]


@pytest.mark.parametrize("inside", [lambda f: f, lambda f: jax.vmap(f, (0, None))])
@added
def test_it_may_hold_a_function_under_autocast(inside, added):
    doubled = doubled_sine(added)
    x, w = normal(8, 4), normal(4, 4)
    with jax.set_mesh(mesh()):

        def gradient(fn):
            def total(x, w):
                return jnp.sum(inside(fn)(x, w).astype(jnp.float32))

            return over_rows(jax.grad(total))(x, w)

        actual, expected = over_rows(inside(cast(doubled, "gpu")))(x, w), doubled(x, w)
        gradients = gradient(cast(doubled, "gpu")), gradient(doubled)
    assert actual.dtype == jnp.float16
    assert error(actual, expected) < TOLERANCE["gpu"]
    assert error(*gradients) < TOLERANCE["gpu"]
