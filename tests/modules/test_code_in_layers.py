"""Code of the user's that a layer runs, as its product, has the rules of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from flax import nnx

import jamp

X = 300 * np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)
STEPS = 600


def normalized(x, axes):
    return x / jnp.sqrt(jnp.sum(x * x, axes, keepdims=True) + 1e-6)


def cosine(lhs, rhs, dimensions, **options):
    """A product of vectors of length one: in float16 their squares overflow."""
    (left, right), _ = dimensions
    return jax.lax.dot_general(
        normalized(lhs, left), normalized(rhs, right), dimensions
    )


def cosine_conv(lhs, rhs, *args, **options):
    options.pop("preferred_element_type", None)
    taken = normalized(lhs, -1), normalized(rhs, (0, 1))
    return jax.lax.conv_general_dilated(*taken, *args, **options)


def of_linen(layer):
    variables = layer.init(jax.random.key(0), X)
    return lambda x: layer.apply(variables, x)


LAYERS = {
    "linen.Dense": lambda: of_linen(nn.Dense(3, dot_general=cosine)),
    "linen.DenseGeneral": lambda: of_linen(nn.DenseGeneral(3, dot_general=cosine)),
    "linen.Conv": lambda: of_linen(nn.Conv(3, (1,), conv_general_dilated=cosine_conv)),
    "nnx.Linear": lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0), dot_general=cosine),
    "nnx.LinearGeneral": lambda: nnx.LinearGeneral(
        4, 3, rngs=nnx.Rngs(0), dot_general=cosine
    ),
    "nnx.Conv": lambda: nnx.Conv(
        4, 3, (1,), rngs=nnx.Rngs(0), conv_general_dilated=cosine_conv
    ),
}


@each_device
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_multiplies_as_the_function_that_it_is_given(name, device):
    layer = LAYERS[name]()
    found = jamp.autocast(layer, device_type=device)(X)
    # The product's, which the bias, of fewer dimensions, does not change.
    assert found.dtype == LOW[device]
    np.testing.assert_allclose(
        np.float32(found), layer(X), atol=4 * float(jnp.finfo(LOW[device]).eps)
    )


def plain(lhs, rhs, dimensions, precision):
    return cosine(lhs, rhs, dimensions)


with_rule = jax.custom_jvp(plain, nondiff_argnums=(2, 3))


@with_rule.defjvp
def with_rule_jvp(dimensions, precision, primals, tangents):
    return jax.jvp(lambda *args: cosine(*args, dimensions), primals, tangents)


# Equations that hold them were emitted by the layer, and by no line of the user's.
PROGRAMS = {
    "jitted": jax.jit(plain, static_argnums=2),
    "with a derivative rule": with_rule,
    "checkpointed": jax.checkpoint(plain, static_argnums=2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_layer_multiplies_as_a_transformed_function_that_it_is_given(name):
    layer = of_linen(nn.Dense(3, dot_general=PROGRAMS[name]))
    found = jamp.autocast(layer, device_type="gpu")(X)
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(np.float32(found), layer(X), atol=4 * eps)


class Observed(nn.Module):
    """A product that keeps a sum of the largest elements, as quantisation does."""

    @nn.compact
    def __call__(self, lhs, rhs, dimensions, **options):
        total = self.variable("stats", "sum", jnp.zeros, ())
        total.value += jnp.abs(lhs).max()
        return jax.lax.dot_general(lhs, rhs, dimensions)


class ObservedNnx(nnx.Module):
    def __init__(self):
        self.total = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, lhs, rhs, dimensions, **options):
        self.total[...] += jnp.abs(lhs).max()
        return jax.lax.dot_general(lhs, rhs, dimensions)


@each_device
def test_what_a_product_of_the_users_keeps_stays_in_float32(device):
    layer = nn.Dense(3, dot_general_cls=Observed)
    variables = layer.init(jax.random.key(0), X)

    @jamp.autocast(device_type=device)
    def step(stats, _):
        seen = {"params": variables["params"], "stats": stats}
        return layer.apply(seen, X, mutable=["stats"])[1]["stats"], None

    zero = jax.tree.map(jnp.zeros_like, variables["stats"])
    last, _ = jax.lax.scan(step, zero, length=STEPS)
    (total,) = jax.tree.leaves(last)
    np.testing.assert_allclose(total, STEPS * np.abs(X).max(), rtol=1e-5)


@each_device
def test_what_a_product_of_an_nnx_layer_keeps_stays_in_float32(device):
    product = ObservedNnx()
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dot_general=product)
    run = nnx.jit(jamp.autocast(lambda layer, x: layer(x), device_type=device))
    for _ in range(STEPS):
        run(layer, X)
    assert product.total[...].dtype == jnp.float32
    np.testing.assert_allclose(product.total[...], STEPS * np.abs(X).max(), rtol=1e-5)


def test_what_intercepts_layers_and_calls_them_leaves_their_rule():
    layer = nn.RNN(nn.LSTMCell(3))
    variables = layer.init(jax.random.key(0), X)

    @jamp.autocast(device_type="gpu")
    def intercepted(x):
        passing = nn.intercept_methods(lambda call, args, kwargs, _: call(*args))
        with passing:
            return layer.apply(variables, x)

    assert intercepted(X).dtype == jnp.float16


def test_a_rule_of_the_users_for_a_layer_holds_for_all_that_runs_in_it():
    layer = LAYERS["linen.Dense"]()
    policy = jamp.Policy.load("gpu").with_rules(lower=[nn.Dense])
    found = jamp.autocast(layer, device_type="gpu", policy=policy)(10 * X)
    # The squares have overflowed.
    np.testing.assert_array_equal(found, 0)


def test_a_report_says_which_rule_code_in_a_layer_has():
    report = jamp.explain(LAYERS["linen.Dense"](), device_type="gpu")(X)
    (line,) = [line for line in report.text().splitlines() if "sqrt" in line]
    assert "promote" in line
    assert "test_code_in_layers.py" in line
