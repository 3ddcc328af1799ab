"""Objects that eager calls depend on: their changes are seen, nothing is kept alive."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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


class Wrapping(Configuration):
    """A mutable object around a function, with its attributes."""

    def __init__(self, factor):
        super().__init__(factor)
        functools.update_wrapper(self, lambda x: x)

    def __call__(self, x):
        return self.__wrapped__(x) * self.factor


class Table(dict):
    """Data with a method that is not Python's."""

    def __init__(self, factor):
        super().__init__(factor=factor)
        self.scaled = functools.partial(lambda get, x: x * get("factor"), self.get)

    factor = property(
        lambda self: self["factor"], lambda self, new: self.update(factor=new)
    )


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
        (Wrapping, lambda wrapping: wrapping),
        (Wrapping, jax.vmap),
        (Table, lambda table: table.scaled),
        (Table, lambda table: jax.vmap(table.scaled)),
    ],
)
def test_a_changed_object_is_seen_by_its_methods(kind, function):
    config = kind(2.0)
    fn = jamp.autocast(function(config))
    np.testing.assert_array_equal(fn(X), X * 2)
    config.factor = 3.0
    np.testing.assert_array_equal(fn(X), X * 3)


@pytest.mark.parametrize(
    ("kind", "argument", "scaled"),
    [
        (Wrapping, lambda wrapping: wrapping, lambda x, fn: fn(x)),
        (Wrapping, jax.vmap, lambda x, fn: fn(x)),
        (Table, lambda table: table.get, lambda x, get: x * get("factor")),
    ],
)
def test_a_changed_object_is_seen_in_a_function_among_the_arguments(
    kind, argument, scaled
):
    held = kind(2.0)
    fn, given = jamp.autocast(scaled), argument(held)
    np.testing.assert_array_equal(fn(X, given), X * 2)
    held.factor = 3.0
    np.testing.assert_array_equal(fn(X, given), X * 3)


def test_a_changed_class_is_seen_by_its_class_methods():
    class Scaling:
        factor = 2.0

        @classmethod
        def scaled(cls, x):
            return x * cls.factor

    fn = jamp.autocast(Scaling.scaled)
    np.testing.assert_array_equal(fn(X), X * 2)
    Scaling.factor = 3.0
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


jitted = nnx.jit(lambda x: x * 2)


def test_a_function_among_the_arguments_is_traced_once_and_not_kept_alive():
    traces = []

    def apply(x, activation):
        traces.append(activation)
        return activation(x)

    def double(x):
        return x * 2

    fn = jamp.autocast(apply)
    for activation in (double, jax.nn.relu, jnp.tanh, jitted):
        fn(X, activation), fn(X, activation)
    assert traces == [double, jax.nn.relu, jnp.tanh, jitted]
    seen = weakref.ref(double)
    traces.clear()
    del double, activation
    gc.collect()
    assert seen() is None
