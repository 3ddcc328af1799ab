"""Equal calls are planned and differentiated once; others share nothing."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import matmul_dtypes

import jamp
from jamp._emit import custom_functions
from jamp._equations.walks import equations

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)) / 3, jnp.float32)


@pytest.fixture
def planned(monkeypatch):
    """The rules that have been planned."""
    found = []

    def plan(*arguments):
        found.append(arguments)
        return original(*arguments)

    original = custom_functions.plan_program
    monkeypatch.setattr(custom_functions, "plan_program", plan)
    return found


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(8)(x))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Block()(x)
        return x.sum()


def test_the_rule_of_an_activation_is_planned_once_for_all_layers(planned):
    network = Network()
    params = network.init(jax.random.key(0), X)
    jax.make_jaxpr(jax.grad(jamp.autocast(network.apply)))(params, X)
    assert len(planned) == 1


def counted_jvp(seen):
    """A function that leaves word whenever its rule is traced."""
    function = jax.custom_jvp(lambda x: x * jnp.tanh(x))

    @function.defjvp
    def rule(primals, tangents):
        seen.append("jvp")
        return function(*primals), jnp.tanh(primals[0]) * tangents[0]

    return function


def counted_vjp(seen):
    function = jax.custom_vjp(lambda x: jnp.round(x))

    def backward(x, g):
        seen.append("backward")
        return (jnp.where(jnp.abs(x) < 1, g, 0),)

    def forward(x):
        seen.append("forward")
        return jnp.round(x), x

    function.defvjp(forward, backward)
    return function


@pytest.mark.parametrize("make", [counted_jvp, counted_vjp])
def test_the_rules_of_a_function_are_traced_once_for_all_layers(make):
    def found(layers):
        seen = []
        function = make(seen)

        def loss(x):
            for _ in range(layers):
                x = function(x @ W)
            return x.sum()

        # The policy keeps the function in 16 bits: elsewhere planning reads the rules.
        jax.make_jaxpr(jax.grad(jamp.autocast(loss, device_type="gpu")))(X)
        return seen

    assert found(layers=4) == found(layers=1) != []


def by_jvp(slope):
    """A function whose rule alone knows a number."""
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda primals, tangents: (function(*primals), slope * tangents[0]))
    return function


def by_vjp(slope):
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, g: (slope * g,))
    return function


def by_jvp_of_array(slope):
    return by_jvp(jnp.full(8, slope))


def by_argument(slope):
    """A function with one rule, which takes the number as an argument."""
    return partial(_scaled, slope)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scaled(slope, x):
    return x


@_scaled.defjvp
def _scaled_jvp(slope, primals, tangents):
    return primals[0], slope * tangents[0]


def by_structure(slope):
    """A function with one rule, which does what the structure of its argument says."""
    name = "double" if slope == 2.0 else "other"
    return lambda x: _named({name: x})


@jax.custom_jvp
def _named(named):
    return next(iter(named.values()))


@_named.defjvp
def _named_jvp(primals, tangents):
    slope = 2.0 if "double" in primals[0] else 5.0
    return _named(*primals), slope * _named(*tangents)


@pytest.mark.parametrize(
    "make", [by_jvp, by_vjp, by_jvp_of_array, by_argument, by_structure]
)
def test_rules_that_differ_in_a_number_alone_are_kept_apart(make):
    small, large = make(2.0), make(5.0)

    def loss(x):
        return small(x @ W).sum() + 10 * large(x @ W).sum()

    found = jax.grad(jamp.autocast(loss))(X)
    np.testing.assert_allclose(found, 52 * jnp.ones_like(X) @ W.T, rtol=2e-2, atol=0.1)


def hiding(slope):
    """A function whose second derivative is that of another function in its rule."""
    inner = by_vjp(slope)
    function = jax.custom_jvp(lambda x: x * x / 2)
    function.defjvp(
        lambda primals, tangents: (function(*primals), inner(*primals) * tangents[0])
    )
    return function


def exponential(rate):
    """A function that is its own derivative but for a number."""
    function = jax.custom_jvp(lambda x: jnp.exp(rate * x))
    function.defjvp(
        lambda primals, tangents: (
            function(*primals),
            rate * function(*primals) * tangents[0],
        )
    )
    return function


@pytest.mark.parametrize(("make", "order"), [(hiding, 2), (exponential, 3)])
def test_rules_that_call_functions_with_rules_are_kept_apart(make, order):
    small, large = make(2.0), make(0.5)

    def loss(x):
        return small(x) + 10 * large(x) * jax.nn.relu(x)

    derivatives = [loss, jamp.autocast(loss)]
    for _ in range(order):
        derivatives = [jax.grad(fn) for fn in derivatives]
    expected, found = (jax.jit(fn)(0.5) for fn in derivatives)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def multiplying(*, inside):
    """A function with a product in its rule, which a region may keep in float32."""
    function = jax.custom_vjp(lambda x, w: x)

    def backward(w, g):
        with jamp.autocast(enabled=not inside):
            return g @ w.T, None

    function.defvjp(lambda x, w: (x, w), backward)
    return function


def test_a_region_in_one_of_two_equal_rules_holds_there_alone():
    outside, inside = multiplying(inside=False), multiplying(inside=True)
    loss = jamp.autocast(
        lambda x: (outside(x, W) + inside(x, W)).sum(), device_type="gpu"
    )
    products = matmul_dtypes(jax.make_jaxpr(jax.grad(loss))(X))
    assert [left for left, _ in products] == ["float32", "float16"]


def test_a_rule_for_a_scope_holds_in_rules_of_functions_there_alone():
    function = multiplying(inside=False)

    def loss(x):
        with jax.named_scope("exact"):
            exact = function(x, W)
        return (exact + function(x, W)).sum()

    policy = jamp.Policy.load("gpu").scoped("exact/**", "float32")
    wrapped = jamp.autocast(loss, policy=policy)
    products = matmul_dtypes(jax.make_jaxpr(jax.grad(wrapped))(X))
    assert [left for left, _ in products] == ["float16", "float32"]


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_calls_of_one_function_are_one_program(transform):
    layer = transform(lambda x: jnp.tanh(x @ W))

    def network(x):
        for _ in range(5):
            x = layer(x)
        return x

    program = jax.make_jaxpr(jamp.autocast(network))(X)
    name = program.eqns[-1].primitive.name
    calls = [eqn for eqn in program.eqns if eqn.primitive.name == name]
    assert len(calls) == 5
    # The first takes the argument, others what a layer has made.
    assert len({id(eqn.params["jaxpr"]) for eqn in calls[1:]}) == 1


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_functions_that_call_others_twice_are_traced_in_no_more_time(transform):
    def twice(function):
        return transform(lambda x: function(function(x)))

    function = lambda x: jnp.tanh(x @ W)  # noqa: E731
    for _ in range(24):  # it stands there a million times
        function = twice(function)
    program = jax.make_jaxpr(jamp.autocast(function))(X)
    assert len([*equations(program)]) < 300
