"""What a function does to the structure of modules is kept, as `nnx.jit` keeps it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from module_changes import (
    MAY_SOW,
    Net,
    X,
    counted,
    gpu,
    in_a_cycle,
    in_eval_mode,
    mean,
    of_another_kind,
    same_state,
    sowing,
    swapped,
    tied,
    with_a_cache,
    with_a_lazy_layer,
    with_layers_in_containers,
    with_other_variables,
)

import jamp

pytestmark = MAY_SOW


class Plain(nnx.Module, pytree=False):
    """Its lists may hold modules, and attributes arrays."""

    def __init__(self):
        self.layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(0))]
        self.last = jnp.zeros((8, 4))


CHANGES = [
    counted,
    in_eval_mode,
    of_another_kind,
    with_a_cache,
    sowing,
    with_a_lazy_layer,
    with_layers_in_containers,
    swapped,
    tied,
    in_a_cycle,
    with_other_variables,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_that_of_nnx_jit(change):
    expected, model = Net(), Net()
    run, wanted = gpu(change), nnx.jit(change)
    for _ in range(3):
        result = run(model, X)
        reference = wanted(expected, X)
        np.testing.assert_allclose(
            result.astype(jnp.float32), reference, rtol=0.02, atol=0.02
        )
        same_state(model, expected)


def test_what_is_deleted_is_gone():
    def fn(model, x):
        y = model(x)
        del model.first.bias, model.second, model.count
        return y

    expected, model = Net(), Net()
    first = model.first
    gpu(fn)(model, X)
    nnx.jit(fn)(expected, X)
    same_state(model, expected)
    assert model.first is first
    assert not hasattr(first, "bias")
    assert not hasattr(model, "count")


def test_objects_that_the_caller_has_stay_the_same_objects():
    model = Net()
    first, kernel, dropout = model.first, model.first.kernel, model.dropout
    gpu(swapped)(model, X)
    gpu(in_eval_mode)(model, X)
    assert model.second is first
    assert model.second.kernel is kernel
    assert model.dropout is dropout
    gpu(in_a_cycle)(model, X)
    assert model.me is model


@pytest.mark.parametrize("change", [counted, in_eval_mode, tied])
def test_an_equal_call_does_again_what_was_traced_once(change):
    traces = []

    def fn(model, x):
        traces.append(None)
        return change(model, x)

    run = gpu(fn)
    for seed in range(3):
        model, expected = Net(), Net()
        x = jax.random.normal(jax.random.key(seed), (8, 4))
        run(model, x)
        change(expected, x)
        same_state(model, expected)
    assert len(traces) == 1


def test_a_changed_structure_is_traced_anew():
    model, counts = Net(), []

    def fn(model, x):
        counts.append(model.count)
        return counted(model, x)

    run = gpu(fn)
    for _ in range(3):
        run(model, X)
    model.count = 0
    run(model, X)
    assert counts == [0, 1, 2]
    assert model.count == 1


def of_two(one, other, x):
    one.taken = other.first
    other.first = nnx.Linear(4, 4, rngs=nnx.Rngs(5))
    return other(x)


def test_a_layer_may_move_to_a_module_among_other_arguments():
    one, other = Net(), Net()
    layer = other.first
    gpu(of_two)(one, other, X)
    assert one.taken is layer
    assert other.first is not layer
    expected = Net(), Net()
    nnx.jit(of_two)(*expected, X)
    same_state(one, expected[0])
    same_state(other, expected[1])


def test_a_module_that_is_given_twice_is_one():
    model, expected = Net(), Net()
    run = lambda model, same, x: counted(model, same.first(x))  # noqa: E731
    gpu(run)(model, model, X)
    nnx.jit(run)(expected, expected, X)
    same_state(model, expected)
    assert model.count == 1


class Counting(Net):
    def __call__(self, x):
        return self.step(x)

    def step(self, x):
        self.count += 1
        self.cache = nnx.Cache(self.first(x))
        return super().__call__(x)


def within(fn):
    """A function that closes over another, and this over a third."""
    inner = lambda x: fn(x)  # noqa: E731
    return lambda x: inner(x)


WAYS = {
    "module": lambda model: gpu(model)(X),
    "method": lambda model: gpu(model.step)(X),
    "closure": lambda model: gpu(lambda x: model(x))(X),
    "closure of a closure": lambda model: gpu(within(lambda x: model(x)))(X),
    "closure over a method": lambda model: gpu(within(model.step))(X),
    "partial": lambda model: gpu(functools.partial(Counting.step, model))(X),
    "keyword": lambda model: gpu(lambda x, model: model(x))(X, model=model),
    "list": lambda model: gpu(lambda models: models[0](X))([model]),
    "region around": lambda model: gpu(lambda model: gpu(model)(X))(model),
    "traced in every call": lambda model: _checked(gpu(model)),
}


def _checked(run):
    with jax.debug_nans(True):
        return run(X)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_may_reach_the_function_in_any_way(way):
    model, expected = Counting(), Counting()
    WAYS[way](model)
    nnx.jit(Counting.step)(expected, X)
    same_state(model, expected)


def test_functions_that_close_over_one_module_and_each_other_see_its_changes():
    model = Net()

    def outer(x, left):
        model.count += 1
        return inner(x, left)

    def inner(x, left):
        return outer(x, left - 1) if left else x * model.count

    fn = gpu(outer)
    np.testing.assert_array_equal(fn(X, 2), X * 3)
    np.testing.assert_array_equal(fn(X, 0), X * 4)
    assert model.count == 4


def test_lists_and_arrays_of_a_module_that_is_no_pytree_are_kept():
    def fn(model, x):
        model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
        model.last = model.layers[0](x)
        return model.last

    expected, model = Plain(), Plain()
    for _ in range(2):
        gpu(fn)(model, X)
        nnx.jit(fn)(expected, X)
        same_state(model, expected)
    assert len(model.layers) == 3
    assert model.last.dtype == jnp.float32  # as it was


def test_attributes_of_an_optimizer_are_kept():
    def step(model, optimizer, x):
        grads = nnx.grad(mean(counted))(model, x)
        optimizer.update(model, grads)
        optimizer.note = "updated"
        return grads

    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    gpu(step)(model, optimizer, X)
    assert model.count == 1
    assert optimizer.note == "updated"
    assert optimizer.step[...] == 1


def test_results_are_the_callers_modules_where_they_are_part_of_them():
    def fn(model, x):
        model.cache = nnx.Cache(model.first(x))
        made = nnx.Sequential(model.first, nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        return model, {"first": model.first}, model.cache, made, Plain()

    for way in (nnx.jit, gpu):
        run, model = way(fn), Net()
        for _ in range(2):
            same, layers, cache, made, plain = run(model, X)
            assert same is model
            assert layers["first"] is model.first
            assert cache is model.cache
            assert made.layers[0] is model.first
            assert isinstance(plain, Plain)
            made.used = True  # it may be changed


def test_a_result_beside_a_module_is_as_it_was_computed():
    def fn(model, x):
        grads = nnx.grad(lambda model: jnp.mean(model.first(x)))(model)
        return grads, nnx.state(model, nnx.Param), model.first(x)

    grads, state, y = gpu(fn)(Net(), X)
    wanted, wanted_state, _ = nnx.jit(fn)(Net(), X)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    assert jax.tree.structure(state) == jax.tree.structure(wanted_state)
    assert y.dtype == jnp.float16


def test_metadata_of_a_variable_is_kept_as_in_a_plain_call():
    def fn(model, x):
        model.first.kernel.set_metadata(reviewed=True)
        return model(x)

    model, expected = Net(), Net()
    gpu(fn)(model, X)
    fn(expected, X)  # nnx.jit would lose it
    same_state(model, expected)


def test_an_array_in_a_static_attribute_is_refused():
    def fn(model, x):
        model.history.append(model.first(x))
        return x

    model = Net()
    model.history = []
    with pytest.raises(jamp.AutocastTypeError, match="attribute 'history' of a flax"):
        gpu(fn)(model, X)


def test_an_old_flax_is_named(monkeypatch):
    monkeypatch.delattr(nnx, "graphlib")
    with pytest.raises(jamp.AutocastError, match=r"Flax 0\.12\.7 or newer"):
        gpu(lambda model, x: model(x))(Net(), X)
