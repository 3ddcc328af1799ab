"""Whole models train under autocast as they do in float32, with float32 weights."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jaxprs import dtypes, is_float, matmul_dtypes
from models import MODELS, make_task

import jamp
from jamp._policy.rules import Rule

LOW = {"cpu": "bfloat16", "gpu": "float16"}
# float16 loses gradients below 6e-8; a fixed scale is enough for these models.
LOSS_SCALE = {None: 1.0, "cpu": 1.0, "gpu": 2.0**10}

each_model = pytest.mark.parametrize("name", MODELS)
each_device = pytest.mark.parametrize("device", LOW)
# Compiling every model once more, for float16, takes half a minute.
each_training = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)]
)

task_of = functools.cache(make_task)


class Run(NamedTuple):
    """What training leaves behind.

    Attributes:
        losses: The loss of every step.
        final: Parameters, state, optimizer state and gradients after the last step.
        finite: Whether all gradients of all steps were finite.
    """

    losses: np.ndarray
    final: tuple[Any, ...]
    finite: bool


@functools.cache
def traced_step(name, device):
    """A step, traced; the loss is computed under autocast if device is given.

    It takes parameters and state, and returns the loss, the gradients of the loss
    times its scale, and the new state.
    """
    task, scale = task_of(name), LOSS_SCALE[device]
    loss_fn = task.loss_fn
    if device:
        loss_fn = jamp.autocast(loss_fn, device_type=device)

    def scaled_loss(params, state, batch):
        loss, state = loss_fn(params, state, batch)
        return loss * scale, (loss, state)

    def step(params, state, batch):
        grads, (loss, state) = jax.grad(scaled_loss, has_aux=True)(params, state, batch)
        return loss, grads, state

    # XLA may leave out roundings to 16 bits unless it is told not to.
    options = {"xla_allow_excess_precision": False}
    step = jax.jit(step, compiler_options=options)
    return step.trace(task.params, task.state, task.batches[0])


@functools.cache
def update_of(name):
    """The optimizer's step, compiled once for both runs and all parameters end to end.

    The models' optimizers know no single parameters; a kernel for each of them would
    take as long to compile as the model.
    """

    def update(params, opt_state, grads):
        updates, opt_state = task_of(name).optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(update)


def end_to_end(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def split_as(tree, flat):
    """What `end_to_end` made of a tree of the same shapes, as that tree."""
    leaves, structure = jax.tree.flatten(tree)
    parts = np.split(np.asarray(flat), np.cumsum([leaf.size for leaf in leaves])[:-1])
    pairs = zip(parts, leaves, strict=True)
    return structure.unflatten(part.reshape(leaf.shape) for part, leaf in pairs)


@functools.cache
def train(name, device):
    """Trains a model on all batches of its task."""
    task, losses, finite = task_of(name), [], True
    step, update = traced_step(name, device).lower().compile(), update_of(name)
    params, state = end_to_end(task.params), task.state
    opt_state = task.optimizer.init(params)
    for batch in task.batches:
        loss, grads, state = step(split_as(task.params, params), state, batch)
        unscaled = end_to_end(grads) / np.float32(LOSS_SCALE[device])
        params, opt_state = update(params, opt_state, unscaled)
        losses.append(float(loss))
        finite &= np.isfinite(unscaled).all()
    return Run(np.array(losses), (params, state, opt_state, grads), finite)


@functools.cache
def report(name, device):
    task = task_of(name)
    explained = jamp.explain(task.loss_fn, device_type=device)
    return explained(task.params, task.state, task.batches[0])


def running_mean(losses):
    return np.cumsum(losses) / np.arange(1, len(losses) + 1)


@pytest.mark.numbers
@each_training
@each_model
def test_the_loss_follows_that_of_float32(name, device):
    low, full = train(name, device).losses, train(name, None).losses
    assert not np.array_equal(low, full)
    assert abs(low[-1] - full[-1]) <= 0.02 * full[-1]
    np.testing.assert_allclose(running_mean(low), running_mean(full), rtol=0.01)


@pytest.mark.numbers
@each_training
@each_model
def test_the_model_learns_as_it_does_in_float32(name, device):
    for run in (train(name, device), train(name, None)):
        assert run.losses[-3:].mean() < 0.75 * run.losses[:3].mean()


@pytest.mark.numbers
@each_training
@each_model
def test_no_gradient_overflows(name, device):
    assert train(name, device).finite


@pytest.mark.numbers
@each_training
@each_model
def test_weights_gradients_and_all_state_stay_float32(name, device):
    floats = filter(is_float, jax.tree.leaves(train(name, device).final))
    assert set(dtypes(list(floats))) == {"float32"}


@each_device
@each_model
def test_every_matmul_and_convolution_runs_in_16_bits(name, device):
    low, full = traced_step(name, device).jaxpr, traced_step(name, None).jaxpr
    assert set(matmul_dtypes(full)) == {("float32", "float32")}
    assert set(matmul_dtypes(low)) == {(LOW[device], LOW[device])}
    assert len(matmul_dtypes(low)) == len(matmul_dtypes(full))
    assert report(name, device).low_flop_share == 1.0


@each_device
@each_model
def test_the_policy_knows_every_op(name, device):
    assert not report(name, device).unknown


@each_device
@each_model
def test_nothing_of_a_floating_dtype_runs_as_traced(name, device):
    for record in report(name, device).records:
        if record.ruling.rule is Rule.AS_TRACED:
            variables = (*record.eqn.invars, *record.eqn.outvars)
            assert not any(is_float(var.aval) for var in variables), record.primitive
