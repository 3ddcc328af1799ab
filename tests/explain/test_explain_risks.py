"""`jamp.explain` tells at which lines 16 bits may lose numbers, and at no others."""

import functools

import char_transformer
import digits
import jax
import jax.numpy as jnp
import lstm
import numpy as np
import pytest
import resnet
from mended_programs import PROGRAMS
from models import MODELS, make_task
from tables import check_each

import jamp

W = np.eye(8, dtype=np.float32)
LOW = [("gpu", jnp.float16), ("cpu", jnp.bfloat16), ("cpu", jnp.float16)]
each_policy = pytest.mark.parametrize(("device", "dtype"), LOW)


def risks(fn, args, device, dtype):
    return jamp.explain(fn, device_type=device, dtype=dtype)(*args).risks


def square_in_a_product(h):
    square = h * h
    return square @ W


def power_in_a_product(h):
    power = jax.nn.relu(h) ** 2
    return power @ W


def cube_in_a_branch(h):
    return jax.lax.cond(h[0, 0] > 0, jnp.tanh, lambda h: (h * h * h) * 2**-10, h)


def masked_square(h):
    return jnp.where(h > 1, jnp.square(h), 0) @ W


def square_of_a_jitted_function(h):
    return jax.jit(lambda h: h * h)(h) @ W


def square_of_each_row(h):
    return jax.lax.scan(lambda total, row: (total, (row * row) @ W), 0, h)[1]


def mean_of_squares(h):
    return (h * h).mean(-1) @ W


def listed_variance(h):
    return jnp.var(h, axis=-1) @ W


def variance_by_hand(h):
    return jnp.mean((h - h.mean(-1, keepdims=True)) ** 2, -1) @ W


def softmax_without_maximum(h):
    weights = jnp.exp(h)
    return (weights @ W) / weights.sum(-1, keepdims=True)


def norm_by_einsum(h):
    return h / jnp.sqrt(jnp.einsum("...d,...d->...", h, h))[..., None]


def energy(h):
    return 0.5 * jnp.vdot(h, h)


GROWING = {
    norm_by_einsum: "dot_general",
    energy: "dot_general",
    square_in_a_product: "mul",
    power_in_a_product: "integer_pow",
    cube_in_a_branch: "mul",
    masked_square: "square",
    square_of_a_jitted_function: "mul",
    square_of_each_row: "mul",
    mean_of_squares: "mul",
    listed_variance: "square",
    variance_by_hand: "integer_pow",
    softmax_without_maximum: "exp",
}


def variance_of_pooled(h):
    mean = W @ h
    return W @ (h * h) - mean * mean


def distances(h):
    sizes = jnp.sum(h**2, -1)
    return sizes[:, None] + sizes - 2 * (h @ h.T)


def softmax_with_maximum(h):
    weights = jnp.exp(h - h.max(-1, keepdims=True))
    return (weights @ W) / weights.sum(-1, keepdims=True)


def softmax_normalised(h):
    weights = jnp.exp(h)
    return (weights / weights.sum(-1, keepdims=True)) @ W


def radial_basis(h):
    return jnp.exp(-0.5 * jnp.square(h)) @ W


def norm(h):
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) @ W


def capped(h):
    return jnp.minimum(h * h, 100.0) @ W


def square_of_probabilities(h):
    return (1 - jax.nn.sigmoid(h)) ** 2 @ W


def scaled_in_a_region(h):
    with jamp.autocast(enabled=False):
        square = h * h
    return (square / 1e3) @ W


def scaled_by_what_16_bits_do_not_hold(h):
    return (h * h * h * 1e-3) @ W


def scaled_after_a_cast(h):
    wide = h.astype(jnp.float32)
    return (wide * wide * 1e-3) @ W


def returned(h):
    return h * h, jnp.exp(h)


SAFE = [
    softmax_with_maximum,
    softmax_normalised,
    radial_basis,
    norm,
    capped,
    square_of_probabilities,
    scaled_in_a_region,
    scaled_after_a_cast,
    scaled_by_what_16_bits_do_not_hold,
    returned,
]


def lines_of(fn):
    first = fn.__code__.co_firstlineno
    return {line for *_, line in fn.__code__.co_lines() if line and line > first}


def told(fn, device, dtype):
    """The operations that are told, each of them at a line of the function."""
    found = risks(lambda x: fn(x @ W), (W,), device, dtype)
    for sentence in found:
        name, line = sentence.split(",")[0].split(" of ")[0].split(" at ")[1].split(":")
        assert name == "test_explain_risks.py"
        assert int(line) in lines_of(fn)
    return {sentence.split()[0] for sentence in found}


def narrow(dtype):
    return dtype == jnp.float16


@each_policy
def test_what_grows_is_told_where_the_range_is_narrow(device, dtype):
    def check(fn):
        assert told(fn, device, dtype) == ({GROWING[fn]} if narrow(dtype) else set())

    check_each(GROWING, check, lambda fn: fn.__name__)


@each_policy
def test_small_differences_of_rounded_sums_are_told(device, dtype):
    assert "sub" in told(variance_of_pooled, device, dtype)
    assert told(distances, device, dtype) == {"sub"}


@each_policy
def test_of_what_is_safe_nothing_is_told(device, dtype):
    def check(fn):
        assert not told(fn, device, dtype)

    check_each(SAFE, check, lambda fn: fn.__name__)


def test_a_risk_needs_attention():
    report = jamp.explain(lambda x: square_in_a_product(x @ W), device_type="gpu")(W)
    (sentence,) = report.warnings
    assert sentence.startswith("mul at test_explain_risks.py:")
    assert "rounded to float16, may leave its range" in sentence


def test_what_a_library_may_lose_is_told_at_each_line_that_calls_it():
    def fn(x):
        y = jnp.var(x @ W, axis=0)
        z = jnp.var(W @ x, axis=0)
        return (y @ W).sum() + (z @ W).sum()

    options = {"device_type": "gpu", "dtype": "float16"}
    told = [risk.split()[2] for risk in jamp.explain(fn, **options)(W).risks]
    first = fn.__code__.co_firstlineno + 1
    lines = {int(place.strip(",").rpartition(":")[2]) for place in told}
    assert {first, first + 1} <= lines


def test_of_constants_that_are_no_numbers_nothing_is_known():
    def fn(params):
        return jax.grad(lambda p: (p["w"] @ W).sum(), allow_int=True)(params)

    assert risks(fn, [{"w": W, "steps": np.arange(3)}], "gpu", jnp.float16) == ()


@functools.cache
def healthy():
    """Functions that train well, and what they are called with."""
    return [*models(), *(program() for program in PROGRAMS)]


def models():
    for name in MODELS:
        task = make_task(name)
        yield task.loss_fn, task.params, task.state, task.batches[0]
    letters = jnp.zeros((2, 9), jnp.int32)
    yield char_transformer.loss_fn, char_transformer.create(1, 0), letters
    x = jnp.zeros((2, lstm.LENGTH, 2))
    params = jax.eval_shape(lstm.MODEL.init, jax.random.key(0), x)
    yield lstm.loss_fn, params, x, x[:, 0, 0]
    for model in (resnet.MODEL, digits.MODEL):
        images = jnp.zeros((2, 8, 8, 1))
        variables = jax.eval_shape(
            lambda x, model=model: model.init(jax.random.key(0), x, train=False), images
        )

        def logits(variables, x, model=model):
            return model.apply(variables, x, train=True, mutable=["batch_stats"])

        yield logits, variables, images


@pytest.mark.once
@each_policy
def test_of_healthy_models_nothing_is_told(device, dtype):
    def check(row):
        fn, *args = row
        assert risks(fn, args, device, dtype) == ()

    check_each(healthy(), check, lambda row: row[0].__qualname__)
