"""`jamp.diagnose` finds nothing wrong with models that train well."""

import functools
import itertools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mended_programs import PROGRAMS
from models import MODELS, make_task

import jamp

pytestmark = pytest.mark.numbers

LOSS_SCALE = {"float16": 2.0**10, "bfloat16": 1.0}

each_dtype = pytest.mark.parametrize("dtype", LOSS_SCALE)
# The others take up to half a minute each.
QUICK = ("gpt2", "float16")
each_model = pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(*case, marks=[] if case == QUICK else pytest.mark.slow)
        for case in itertools.product(MODELS, LOSS_SCALE)
    ],
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


def normalised(x):
    return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)


def blocks_with_batch_norm(params, x):
    for inner, outer in zip(params[::2], params[1::2], strict=True):
        y = jax.nn.relu(normalised(x @ inner))
        x = jax.nn.relu(x + normalised(y @ outer))
    return jnp.mean((x[:, 0] - 1) ** 2)


def test_a_gradient_that_moves_as_far_in_float32_when_its_weights_are_rounded():
    weights = [numbers(i, 16, 16, scale=0.2) for i in range(20)]
    x = numbers(99, 8, 16)

    def loss(weights):
        return blocks_with_batch_norm(weights, x)

    diagnosis = diagnose(loss, "bfloat16")(weights)
    check(diagnosis)
    rounded = [w.astype(jnp.bfloat16).astype(np.float32) for w in weights]
    plain, other = (np.array(jax.jit(jax.grad(loss))(w)) for w in (weights, rounded))
    moved = np.linalg.norm(other - plain) / np.linalg.norm(plain)
    assert 0.25 < diagnosis.gradient_error < 4 * moved
    assert f"changes by {diagnosis.gradient_moved:.2g}" in str(diagnosis)


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


@each_dtype
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_rounded_after_it_was_read(program, dtype):
    fn, params, x = program()
    low = {"device_type": "gpu", "dtype": dtype}
    assert jamp.diagnose(fn, progress=False, **low)(params, x).healthy
    found = np.float64(jax.jit(jamp.autocast(fn, **low))(params, x))
    expected = jax.jit(fn)(params, x)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 20 * jnp.finfo(dtype).eps


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
        assert "underflow, which took no result further" in diagnosis.text()


@each_dtype
def test_a_gradient_that_is_rounding_only(dtype):
    """What is added to all logits alike has no gradient; its sum is not zero."""

    def loss_fn(params, x):
        logits = x @ params["w"] + params["shift"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {"w": numbers(0, 16, 8), "shift": numbers(1, 1)}
    check(diagnose(loss_fn, dtype)(params, numbers(2, 32, 16)))


def sum_of_probabilities(w, x):
    return jnp.sum(jax.nn.softmax(x @ w["a"]))  # 1 for each example


def centred(w, x):
    h = x @ w["a"]
    return jnp.mean(h - h.mean(0))


def difference_of_two_alike(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"])) - jnp.mean(jnp.tanh(x @ w["b"]))


@each_dtype
@pytest.mark.parametrize(
    "loss_fn", [sum_of_probabilities, centred, difference_of_two_alike]
)
def test_a_result_that_is_zero_but_for_rounding(loss_fn, dtype):
    a = 0.3 * numbers(0, 16, 8)
    check(diagnose(loss_fn, dtype)({"a": a, "b": 1.0003 * a}, numbers(1, 32, 16)))


@each_dtype
def test_a_solver_that_takes_other_steps(dtype):
    """Both runs end at 1; in 16 bits, an error just below the limit is accepted."""

    def solve(w, x):
        def step(carry):
            t, h, y = carry
            accepted = h * jnp.sum(x @ w) <= 0.25001
            further = jnp.where(accepted, h, 0.0)
            return t + further, jnp.where(accepted, h, h / 2), y + further

        return jax.lax.while_loop(lambda carry: carry[0] < 1, step, (0.0, 0.25, 0.0))[2]

    options = {"device_type": "gpu", "dtype": dtype, "progress": False}
    half = jnp.full((2, 2), 0.25)
    check(jamp.diagnose(solve, **options)(half, 2.0006 * half))


def mixture_of_experts(params, x, y):
    gates = jax.nn.softmax(x @ params["gate"])
    top, chosen = jax.lax.top_k(gates, 2)
    top = top / top.sum(-1, keepdims=True)
    h = jax.nn.gelu(jnp.einsum("nd,edf->nef", x, params["up"]))
    out = jnp.einsum("nef,efd->ned", h, params["down"])
    out = jnp.take_along_axis(out, chosen[..., None], 1)
    load = jax.nn.one_hot(chosen, 4).mean((0, 1))
    balance = 4 * jnp.sum(load * gates.mean(0))
    return jnp.mean(((top[..., None] * out).sum(1) - y) ** 2) + 0.01 * balance


@each_dtype
def test_a_mixture_of_experts(dtype):
    params = {
        "gate": numbers(0, 16, 4, scale=0.2),
        "up": numbers(1, 4, 16, 32, scale=0.25),
        "down": numbers(2, 4, 32, 16, scale=0.17),
    }
    x, y = numbers(3, 2, 32, 16)
    check(diagnose(mixture_of_experts, dtype)(params, x, y))


def solution(params, x):
    h = x[None]
    for w in params[:-1]:
        h = jnp.tanh(h @ w)
    return (h @ params[-1])[0]


def residual_of_an_equation(params, points):
    """How far the solution is from one of Poisson's equation."""
    second = jax.vmap(jax.grad(jax.grad(solution, 1), 1), (None, 0))(params, points)
    return jnp.mean((second + jnp.sin(jnp.pi * points)) ** 2)


@each_dtype
def test_second_derivatives_in_a_loss(dtype):
    params = [numbers(0, 1, 16), numbers(1, 16, 16, scale=0.3), numbers(2, 16, 1)]
    points = np.linspace(0, 1, 32, dtype=np.float32)
    check(diagnose(residual_of_an_equation, dtype)(params, points))


def contrast(params, x, y):
    def encoded(params, x):
        h = jax.nn.relu(x @ params[0]) @ params[1]
        return h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-8)

    logits = encoded(params["x"], x) @ encoded(params["y"], y).T
    logits = logits * jnp.exp(params["temperature"])
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, 0)))


@each_dtype
def test_a_contrastive_loss(dtype):
    params = {
        "x": [numbers(0, 16, 32, scale=0.25), numbers(1, 32, 8, scale=0.17)],
        "y": [numbers(2, 16, 32, scale=0.25), numbers(3, 32, 8, scale=0.17)],
        "temperature": np.float32(2.6),
    }
    x = numbers(4, 32, 16)
    check(diagnose(contrast, dtype)(params, x, x + numbers(5, 32, 16, scale=0.3)))


def action_values(params, states):
    h = jax.nn.relu(states @ params["hidden"])
    advantages = h @ params["advantage"]
    return h @ params["value"] + advantages - advantages.mean(-1, keepdims=True)


def temporal_difference(params, target, states, actions, rewards, following):
    best = jnp.argmax(action_values(params, following), -1)
    values = jnp.take_along_axis(action_values(target, following), best[:, None], -1)
    goal = jax.lax.stop_gradient(rewards + 0.99 * values[:, 0])
    values = jnp.take_along_axis(action_values(params, states), actions[:, None], -1)
    return jnp.mean(optax.huber_loss(values[:, 0], goal))


@each_dtype
def test_double_q_learning(dtype):
    params, target = (
        {
            "hidden": numbers(seed, 8, 32, scale=0.5),
            "value": numbers(seed + 1, 32, 1, scale=0.1),
            "advantage": numbers(seed + 2, 32, 4, scale=0.1),
        }
        for seed in (0, 3)
    )
    actions, states = np.arange(32) % 4, numbers(6, 2, 32, 8)
    diagnosed = diagnose(temporal_difference, dtype)
    check(diagnosed(params, target, states[0], actions, numbers(7, 32), states[1]))


@each_dtype
def test_a_step_whose_key_bias_softmax_ignores(dtype):
    loss_fn = jamp.autocast(attention_loss, device_type="gpu", dtype=dtype)
    tx = optax.sgd(1e-2)

    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = dict(zip("qkvo", jax.random.split(jax.random.key(0), 4), strict=True))
    params = {name: jax.random.normal(key, (32, 32)) / 6 for name, key in keys.items()}
    params["bias"] = jnp.zeros(32)
    x = jax.random.normal(jax.random.key(1), (16, 32))
    found = jamp.diagnose(step, progress=False)(params, tx.init(params), x)
    assert found.healthy, str(found)
    assert found.errors["result[0]['bias']"] > 100


def attention_loss(params, x):
    keys = x @ params["k"] + params["bias"]
    scores = jax.nn.softmax(x @ params["q"] @ keys.T / 6)
    h = x + scores @ (x @ params["v"])
    labels = jnp.arange(16) % 4
    logits = (h @ params["o"])[:, :4]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
