"""Transformations around and inside of autocast pass the structure of modules on."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from module_changes import (
    MAY_SOW,
    Net,
    X,
    counted,
    gpu,
    in_eval_mode,
    mean,
    same_state,
    sowing,
    tied,
    with_a_lazy_layer,
)

import jamp

pytestmark = MAY_SOW


def scanned(fn):
    def run(model, x):
        step = lambda model, x: (model, fn(model, x))  # noqa: E731
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
        return nnx.scan(step, **axes)(model, jnp.stack([x, x]))

    return run


def in_cond(fn):
    return lambda model, x: nnx.cond(x[0, 0] < 9, fn, fn, model, x)


AROUND = {
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "nnx.grad": lambda fn: nnx.grad(mean(fn)),
    "nnx.value_and_grad": lambda fn: nnx.value_and_grad(mean(fn)),
    "nnx.cond": in_cond,
    "nnx.jit of nnx.grad": lambda fn: nnx.jit(nnx.grad(mean(fn))),
}


@pytest.mark.once
@pytest.mark.parametrize("change", [counted, with_a_lazy_layer, tied])
@pytest.mark.parametrize("around", AROUND)
def test_a_transformation_around_passes_the_structure_on(around, change):
    expected, model = Net(), Net()
    for _ in range(2):
        AROUND[around](gpu(change))(model, X)
        AROUND[around](change)(expected, X)
        same_state(model, expected)


INSIDE = {
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "nnx.value_and_grad": AROUND["nnx.value_and_grad"],
    "nnx.cond": in_cond,
}


@pytest.mark.once
@pytest.mark.parametrize("change", [counted, with_a_lazy_layer, tied])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_transformation_inside_changes_the_callers_module(inside, change):
    expected, model = Net(), Net()
    for _ in range(2):
        gpu(INSIDE[inside](change))(model, X)
        nnx.jit(INSIDE[inside](change))(expected, X)
        same_state(model, expected)


@pytest.mark.parametrize("change", [in_eval_mode, counted])
def test_a_scan_keeps_attributes_that_its_body_sets(change):
    expected, model = Net(), Net()
    scanned(gpu(change))(model, X)
    scanned(change)(expected, X)
    same_state(model, expected)


def test_a_vmap_keeps_attributes_and_new_variables():
    make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
    models, expected = (make(jax.random.split(jax.random.key(0), 3)) for _ in "ab")

    def fn(layer, x):
        y = layer(x)
        layer.cache, layer.used = nnx.Cache(y), True
        return y

    nnx.vmap(gpu(fn), in_axes=(0, None))(models, X)
    nnx.vmap(fn, in_axes=(0, None))(expected, X)
    same_state(models, expected)


@pytest.mark.parametrize("change", [counted, in_eval_mode])
def test_scaled_gradients_keep_the_structure(change):
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1))
    expected, model = Net(), Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    run = jamp.value_and_grad(mean(gpu(change)))
    run(optimizer.opt_state, model, X)
    nnx.value_and_grad(mean(change))(expected, X)
    same_state(model, expected)


def test_scaled_gradients_of_a_list_of_modules_keep_its_structure():
    tx = jamp.dynamic_loss_scaling(optax.sgd(0.1))

    def loss(layers, x):
        layers[0].used = True
        return jnp.mean(layers[0](x) ** 2)

    layers, expected = (nnx.List([Net().first, Net().second]) for _ in range(2))
    optimizer = nnx.Optimizer(layers, tx, wrt=nnx.Param)
    _, grads = jamp.value_and_grad(gpu(loss))(optimizer.opt_state, layers, X)
    wanted = nnx.grad(loss)(expected, X)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    same_state(layers, expected)


def test_a_module_from_outside_of_a_trace_is_not_changed_in_it():
    model, untouched = Net(), Net()
    for run in (in_eval_mode, gpu(in_eval_mode)):
        with pytest.raises(TraceContextError, match="Cannot mutate 'Dropout'"):
            jax.jit(lambda x, run=run: run(model, x))(X)
    same_state(model, untouched)
    model.count = 1  # and it is as usable as before


def test_a_module_that_stays_as_it_is_may_be_from_outside_of_the_trace():
    teacher = nnx.Linear(4, 4, rngs=nnx.Rngs(7))
    both = gpu(lambda model, teacher, x: sowing(model, x) - teacher(x))

    @nnx.jit
    def step(model, x):
        return both(model, teacher, x)

    model, expected = Net(), Net()
    step(model, X)
    sowing(expected, X)
    same_state(model, expected)
    teacher.used = True  # it belongs to no trace
