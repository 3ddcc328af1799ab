"""`jamp.diagnose` finds nothing wrong with models that train well."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MODELS, make_task

import jamp

LOSS_SCALE = {"float16": 2.0**10, "bfloat16": 1.0}

each_dtype = pytest.mark.parametrize("dtype", LOSS_SCALE)
# The others take half a minute each.
each_model = pytest.mark.parametrize(
    "name",
    [pytest.param(m, marks=[] if m == "gpt2" else pytest.mark.slow) for m in MODELS],
)


def diagnose(fn, dtype, **options):
    return jamp.diagnose(
        fn,
        device_type="gpu",
        dtype=dtype,
        loss_scale=LOSS_SCALE[dtype],
        progress=False,
        **options,
    )


def check(diagnosis):
    assert diagnosis.healthy, diagnosis
    assert diagnosis.findings == diagnosis.suggestions == ()
    assert "healthy" in str(diagnosis)


@each_dtype
@each_model
def test_a_model(name, dtype):
    task = make_task(name)
    diagnosed = diagnose(task.loss_fn, dtype, has_aux=True)
    check(diagnosed(task.params, task.state, task.batches[0]))


def mlp(params, x, y):
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x @ params[-1] - y) ** 2)


def numbers(seed, *shape, scale=1.0):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@functools.cache
def mlp_arguments():
    params = [numbers(i, 32, 32, scale=0.2) for i in range(4)]
    return params, numbers(5, 64, 32), numbers(6, 64, 32)


@each_dtype
def test_a_multilayer_perceptron(dtype):
    check(diagnose(mlp, dtype)(*mlp_arguments()))


@each_dtype
def test_one_that_recomputes_its_layers(dtype):
    check(diagnose(jax.checkpoint(mlp), dtype)(*mlp_arguments()))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


@each_dtype
def test_a_module_of_nnx_and_its_state_is_left_alone(dtype):
    network = Network(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(network))

    def loss_fn(network, x):
        return jnp.mean(network(x) ** 2)

    check(diagnose(loss_fn, dtype)(network, numbers(0, 64, 16)))
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(network))


def attention(w, x):
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    return jnp.mean((weights @ x) ** 2)


@each_dtype
def test_probabilities_that_underflow_where_it_does_not_matter(dtype):
    diagnosis = diagnose(attention, dtype)(
        numbers(0, 16, 16, scale=0.5), numbers(1, 2, 24, 16)
    )
    check(diagnosis)
    if dtype == "float16":
        assert diagnosis.underflows


@each_dtype
def test_a_gradient_that_is_rounding_only(dtype):
    """What is added to all logits alike has no gradient; its sum is not zero."""

    def loss_fn(params, x):
        logits = x @ params["w"] + params["shift"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {"w": numbers(0, 16, 8), "shift": numbers(1, 1)}
    check(diagnose(loss_fn, dtype)(params, numbers(2, 32, 16)))
