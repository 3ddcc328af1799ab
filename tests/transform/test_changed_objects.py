"""Objects that eager calls depend on: their changes are seen, nothing is kept alive."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

X = jax.device_put(np.arange(1, 5, dtype=np.float32))


class Configuration:
    """A mutable argument with the default hash."""

    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return x * self.factor


class Activation(Configuration):
    """A mutable callable."""

    def __call__(self, x):
        return x * self.factor


class Equal(Configuration):
    """An argument that is compared by its content."""

    def __eq__(self, other):
        return type(other) is type(self) and other.factor == self.factor

    def __hash__(self):
        return hash(self.factor)


@pytest.mark.parametrize("kind", [Configuration, Activation, Equal])
def test_a_changed_object_among_the_arguments_is_seen(kind):
    fn = jamp.autocast(lambda x, config, scaled: (x * config.factor, scaled(x)))
    config = kind(2.0)
    np.testing.assert_array_equal(fn(X, config, config.scaled), [X * 2] * 2)
    config.factor = 3.0
    np.testing.assert_array_equal(fn(X, config, config.scaled), [X * 3] * 2)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (Activation, lambda activation: activation),
        (Activation, functools.partial),
        (Activation, jax.vmap),
        (Configuration, lambda config: config.scaled),
        (Configuration, lambda config: functools.partial(config.scaled)),
        (Configuration, lambda config: jax.vmap(config.scaled)),
        (Configuration, lambda config: jax.vmap(functools.partial(config.scaled))),
        (Equal, lambda config: config.scaled),
    ],
)
def test_a_changed_object_is_seen_by_its_methods(kind, function):
    config = kind(2.0)
    fn = jamp.autocast(function(config))
    np.testing.assert_array_equal(fn(X), X * 2)
    config.factor = 3.0
    np.testing.assert_array_equal(fn(X), X * 3)


def test_a_method_of_an_object_with_a_hash_is_traced_once_for_each_content():
    traces = []

    class Traced(Equal):
        def scaled(self, x):
            traces.append(self.factor)
            return super().scaled(x)

    config = Traced(2.0)
    fn = jamp.autocast(config.scaled)
    fn(X), fn(X)
    config.factor = 3.0
    fn(X), fn(X)
    assert traces == [2.0, 3.0]


@pytest.mark.parametrize("kind", [Configuration, Activation, Equal])
def test_an_object_among_the_arguments_is_not_kept_alive(
    kind, earlier_objects_left_alone
):
    fn = jamp.autocast(lambda x, config: x * config.factor)
    config = kind(2.0)
    seen = weakref.ref(config)
    fn(X, config)
    del config
    gc.collect()
    assert seen() is None


def test_methods_among_the_arguments_take_no_place_of_programs_in_use():
    traces = []

    def apply(x, function=None):
        traces.append(function)
        return x @ x

    fn, config = jamp.autocast(apply), Equal(2.0)
    fn(X)
    for _ in range(200):
        fn(X, config.__eq__)
    fn(X)
    assert traces.count(None) == 1


def test_a_function_among_the_arguments_is_traced_once_and_not_kept_alive():
    traces = []

    def apply(x, activation):
        traces.append(activation)
        return activation(x)

    def double(x):
        return x * 2

    fn = jamp.autocast(apply)
    for activation in (double, double, jax.nn.relu, jax.nn.relu, jnp.tanh, jnp.tanh):
        fn(X, activation)
    assert traces == [double, jax.nn.relu, jnp.tanh]
    seen = weakref.ref(double)
    traces.clear()
    del double, activation
    gc.collect()
    assert seen() is None
