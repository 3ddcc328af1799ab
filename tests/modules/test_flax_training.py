"""A classifier of flax.linen with BatchNorm and dropout, trained under autocast."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jaxprs import dtypes, matmul_dtypes, traced
from test_flax import near

import jamp

LOW_PAIR = ("float16", "float16")


gpu = functools.partial(jamp.autocast, device_type="gpu")


class Classifier(nn.Module):
    """A convolution with BatchNorm and dropout, then a layer."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(3)(x)


class State(TrainState):
    """A train state with the statistics of BatchNorm."""

    batch_stats: dict


def training_step(state, images, labels, key, wrap):
    def loss(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    (value, stats), gradients = jax.value_and_grad(wrap(loss), has_aux=True)(
        state.params
    )
    return state.apply_gradients(grads=gradients, batch_stats=stats), value


@pytest.fixture(scope="module")
def classification():
    images = jax.random.normal(jax.random.key(0), (12, 5, 5, 2))
    labels = jnp.arange(12) % 3
    module = Classifier()
    variables = module.init(jax.random.key(1), images, train=False)
    state = State.create(
        apply_fn=module.apply,
        tx=optax.adamw(0.2),
        params=variables["params"],
        batch_stats=variables["batch_stats"],
    )
    return state, images, labels


def test_a_train_state_of_linen_trains_like_float32(classification):
    state, images, labels = classification
    curves = []
    for wrap in (lambda loss: loss, gpu):
        trained, curve = state, []
        step = jax.jit(functools.partial(training_step, wrap=wrap))
        for key in jax.random.split(jax.random.key(2), 12):
            trained, value = step(trained, images, labels, key)
            curve.append(float(value))
        assert dtypes(trained) == dtypes(state.replace(step=jnp.int32(0)))
        curves.append(curve)
    np.testing.assert_allclose(*curves, rtol=0.05)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_every_matmul_of_a_training_step_runs_in_16_bits(classification):
    step = functools.partial(training_step, wrap=gpu)
    program = traced(step, *classification, jax.random.key(0))
    found = matmul_dtypes(program)
    assert set(found) == {LOW_PAIR}
    assert len(found) == 5  # forward: 2; backward: 2 weights and 1 activation


def test_evaluation_follows_float32_and_changes_no_statistics(classification):
    state, images, _ = classification
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    evaluate = functools.partial(state.apply_fn, train=False)
    result = gpu(evaluate)(variables, images)
    assert result.dtype == jnp.float16
    near(result.astype(jnp.float32), evaluate(variables, images))
