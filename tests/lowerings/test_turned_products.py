"""Products that are transposed: their operands change places, and nothing else does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import primitives, traced
from lowerings.products import assert_equal_derivatives, cast, integers

X, Y = integers(0, (5, 3)), integers(1, (3, 4))
STACKS = integers(0, (2, 5, 3)), integers(1, (2, 3, 4))


def network(w, u, x):
    return (jnp.tanh(x @ w) @ u).sum()


def read_twice(x, y):
    product = x @ y
    return product.T @ product


def given_twice(x, y):
    product = x @ y
    return jnp.stack([product, product.T])


# With how many transposes are left.
PRODUCTS = {
    "a matrix": (lambda x, y: (x @ y).T, X, Y, 0),
    "stacks": (lambda x, y: (x @ y).swapaxes(1, 2), *STACKS, 0),
    "a stack and a matrix": (lambda x, y: (x @ y).transpose(2, 0, 1), STACKS[0], Y, 0),
    "two dimensions of each": (
        lambda x, y: jnp.tensordot(x, y, 1).transpose(2, 3, 0, 1),
        STACKS[0],
        integers(1, (3, 4, 2)),
        0,
    ),
    "a precision of each": (
        lambda x, y: jnp.matmul(x, y, precision=("default", "default")).T,
        X,
        Y,
        0,
    ),
    "twice": (lambda x, y: (x @ y).T.T, X, Y, 1),
    "in a loop": (
        lambda x, y: jax.lax.scan(
            lambda c, x: (c + (x @ y).T, None), Y.T[:, :1] * 0, x
        ),
        X[:, None],
        Y,
        0,
    ),
    "read as it is, too": (read_twice, X, Y, 1),
    "a result as it is, too": (given_twice, X[:4], Y, 1),
    "moved otherwise": (lambda x, y: (x @ y).transpose(1, 0, 2), *STACKS, 1),
    "one operand moved": (lambda x, y: (x @ y).swapaxes(0, 1), STACKS[0], Y, 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_written_as_it_is_read(name):
    fn, x, y, left = PRODUCTS[name]
    assert primitives(traced(fn, x, y))["transpose"] > 0
    assert primitives(traced(cast(fn), x, y))["transpose"] == left


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_derivatives_are_those_of_jax(name):
    fn, x, y, _ = PRODUCTS[name]
    assert_equal_derivatives(lambda x, y: jax.tree.leaves(fn(x, y))[0], x, y)


def test_gradients_taken_inside_are_written_as_they_are_read():
    """JAX transposes what it multiplies to the gradient of a weight."""
    args = [
        0.1 * integers(seed, shape)
        for seed, shape in enumerate([(3, 8), (8, 4), (5, 3)])
    ]
    gradients = jax.grad(network, (0, 1))
    assert primitives(traced(gradients, *args))["transpose"] == 2
    assert primitives(traced(cast(gradients), *args))["transpose"] == 0
    for found, wanted in zip(cast(gradients)(*args), gradients(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=3e-2, atol=3e-2)
