"""Readers in float32 take a value before its rounding, whoever wrote the code."""

import jax
import jax.numpy as jnp
import numpy as np
import program_figures
import pytest
from devices import LOW, each_device
from jaxprs import equations, traced
from unrounded import EYE, activations, assert_gradient_near, both, error_in_roundings

import jamp
from jamp._plan.unrounded import groups


def layer_norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-6)


def layer_norm_of_moments(x):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(x * x, -1, keepdims=True) - mean * mean
    return (x - mean) / jnp.sqrt(variance + 1e-6)


def rms_norm(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def spread(x):
    centred = x - x.mean()
    return centred / jnp.sqrt((centred**2).sum())


NORMS = (layer_norm, layer_norm_of_moments, rms_norm, spread)
every_norm = pytest.mark.parametrize("norm", NORMS)


def parts_in_jits(x):
    squares = jax.jit(jnp.square)(x)
    mean = jax.jit(lambda y: jnp.mean(y, -1, keepdims=True) + 1e-6)(squares)
    return x * jax.jit(jax.lax.rsqrt)(mean)


def helper_in_jit(x):
    mean, variance = jax.jit(lambda x: (x.mean(-1), (x * x).mean(-1)))(x)
    scale = jax.lax.rsqrt(variance - mean * mean)
    return (x - mean[:, None]) * scale[:, None]


def helper_with_more_results_than_are_read(x):
    @jax.jit
    def helper(x):
        squares = x * x
        return squares.mean(-1, keepdims=True) + 1e-6, squares, x @ EYE

    mean, *_ = helper(x)
    return x * jax.lax.rsqrt(mean)


def in_scan(x):
    return jax.lax.scan(lambda total, row: (total, layer_norm(row)), 0, x)[1]


def in_cond(x):
    return jax.lax.cond(x[0, 0] > -1e9, layer_norm, lambda x: x / 1.0, x)


def in_checkpoint(x):
    return jax.checkpoint(layer_norm)(x)


@jax.custom_vjp
def with_a_rule(x):
    return layer_norm(x)


def forward(x):
    y, pullback = jax.vjp(layer_norm, x)
    return y, pullback


with_a_rule.defvjp(forward, lambda pullback, ct: pullback(ct))


@jax.custom_jvp
def with_a_forward_rule(x):
    return layer_norm_of_moments(x)


with_a_forward_rule.defjvp(lambda xs, dxs: jax.jvp(layer_norm_of_moments, xs, dxs))
PLACES = (
    *(parts_in_jits, helper_in_jit, helper_with_more_results_than_are_read),
    *(in_scan, in_cond, in_checkpoint, with_a_rule, with_a_forward_rule),
)


@each_device
@pytest.mark.parametrize(("std", "mean"), [(1, 20), (300, 0), (0.1, 0)])
@every_norm
def test_a_norm_written_by_hand_is_rounded_once(norm, std, mean, device):
    x = activations(std, mean, LOW[device])
    assert error_in_roundings(norm, x, device) <= 0.5


@each_device
@pytest.mark.parametrize("place", PLACES)
def test_it_is_rounded_once_wherever_it_stands(place, device):
    x = activations(1, 20, LOW[device])
    assert error_in_roundings(place, x, device) <= 1


@each_device
@pytest.mark.parametrize("place", PLACES)
def test_it_is_rounded_once_where_it_is_differentiated(place, device):
    x = activations(1, 20, LOW[device])
    of = lambda fn: lambda x: jax.vjp(fn, x)[0]  # noqa: E731
    assert error_in_roundings(place, x, device, of) <= 1


@each_device
@every_norm
def test_its_gradient_is_that_of_float32(norm, device):
    dtype = LOW[device]
    x, weights = activations(1, 4, dtype), activations(1, 0, dtype)

    def gradient(norm):
        return jax.grad(lambda x: jnp.sum(norm(x) * weights))

    assert_gradient_near(*both(norm, device, gradient)(x), 4, device)


@each_device
@every_norm
def test_its_derivative_along_a_direction_is_that_of_float32(norm, device):
    x, direction = (activations(1, mean, LOW[device]) for mean in (4, 0))

    def derivative(norm):
        return lambda x, direction: jax.jvp(norm, (x,), (direction,))[1]

    found, expected = both(norm, device, derivative)(x, direction)
    assert_gradient_near(np.asarray(found, np.float32), expected, 4, device)


def explained_variance(x):
    targets = activations(1, 0, jnp.float32)
    return 1 - jnp.var(targets - x) / (jnp.var(targets) + jnp.var(x))


def softmax_and_variance(x):
    return jax.nn.softmax(x) @ EYE + jnp.var(x, -1, keepdims=True)


@each_device
def test_gradients_of_several_readers_in_float32_are_rounded_once(device):
    # They nearly cancel.
    x = activations(300, 0, LOW[device])

    def gradient(fn):
        return jax.grad(lambda x: fn(x) * 1e6)

    assert_gradient_near(*both(explained_variance, device, gradient)(x), 1, device)


LENGTHS = {
    "norm": lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True),
    "norm of magnitudes": lambda x: jnp.linalg.norm(x, 1, -1, keepdims=True),
    "norm of the matrix": jnp.linalg.norm,
    "by hand": jax.jit(lambda x: jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))),
}


@each_device
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_gradients_of_a_jitted_length_and_of_what_it_divides_are_rounded_once(
    length, device
):
    rng = np.random.default_rng(0)
    w, x, c = (
        rng.standard_normal(s).astype("float32") for s in ((16, 8), (12, 16), (12, 8))
    )

    def loss(w):
        h = x @ w
        unit = h / length(h)
        # Nothing is left of the gradient of the second term, which is larger.
        return jnp.sum(c * unit + 30 * length(unit))

    found = jax.grad(jamp.autocast(loss, device_type=device))(w)
    expected = jax.grad(loss)(w)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 3 * jnp.finfo(LOW[device]).eps


@each_device
@pytest.mark.parametrize("norm", [*NORMS, softmax_and_variance])
def test_it_keeps_the_16_bit_input_alone_for_the_backward_pass(norm, device):
    x, w = activations(1, 4, np.float32), np.ones((64, 32), np.float32)

    def loss(params, x):
        return jnp.sum(norm(x @ params[0]) @ params[1]), None

    saved = program_figures.saved_for_backward(
        jamp.autocast(loss, device_type=device), (EYE, w), x
    )
    dtypes = {str(found.dtype) for found in saved if found.shape == (8, 64)}
    assert dtypes == {jnp.dtype(LOW[device]).name}


def test_a_sum_that_goes_on_through_blocks_is_rounded_for_gpus():
    """A GPU would write the float32 of each for the norms and sums that read it."""

    def loss(params, x):
        x = x @ params[0]
        for w in params[1:]:
            x = x + layer_norm(x) @ w
        return jnp.sum(layer_norm(x) ** 2), None

    saved = program_figures.saved_for_backward(
        jamp.autocast(loss, device_type="gpu"), [EYE] * 5, activations(1, 4, np.float32)
    )
    dtypes = {str(found.dtype) for found in saved if found.shape == (8, 64)}
    assert dtypes == {"float16"}


def test_a_long_chain_is_planned_in_time_proportional_to_its_length(monkeypatch):
    added = []
    add = groups.Group.add

    def counted(group, eqns, *rest):
        added.extend(eqns)
        add(group, eqns, *rest)

    def fn(x):
        h = x @ x
        for _ in range(100):
            h = h * 1.01 + jnp.sin(h) * 0.1 - h.mean()
        return h.sum()

    monkeypatch.setattr(groups.Group, "add", counted)
    program = traced(fn, jnp.ones((4, 4)))
    traced(jamp.autocast(fn, device_type="cpu"), jnp.ones((4, 4)))
    assert len(program.eqns) / 2 < len(added) < len(program.eqns) * 2


@each_device
def test_a_metric_beside_a_loss_does_not_change_it(device):
    def loss(x, metrics):
        p = 0.5 + 0.5 * jnp.tanh(x @ EYE)
        return jnp.log(1 - p + 1e-7).mean(), metrics(p)

    x = activations(2, 0, LOW[device])
    accuracy, nothing = (lambda p: (p > 0.5).mean()), (lambda p: 0.0)
    with_metric, without = (
        jamp.autocast(loss, device_type=device)(x, metrics)[0]
        for metrics in (accuracy, nothing)
    )
    assert with_metric == without
    np.testing.assert_allclose(without, loss(x, nothing)[0], rtol=1e-3)


@each_device
def test_what_nobody_reads_rounds_nothing(device):
    def loss(x, unread=lambda p: None):
        p = 0.5 - 0.5 * jnp.tanh(x @ EYE)
        unread(p)
        return jnp.log(p + 1e-7).mean()

    def backward_unread(x):
        return jax.vjp(loss, x)[0]

    x = activations(2, 0, LOW[device])
    alone, *others = (
        jamp.autocast(fn, device_type=device)(x)
        for fn in (loss, lambda x: loss(x, jnp.tanh), backward_unread)
    )
    assert others == [alone, alone]
    np.testing.assert_allclose(alone, loss(x), rtol=1e-3)


@each_device
def test_dtypes_stay_as_they_are(device):
    def returned(x):
        y = x @ EYE
        square = y * y
        return y, square, square.mean(-1), square + 1, jnp.exp(y.max(-1))

    dtypes = [y.dtype for y in jamp.autocast(returned, device_type=device)(EYE)]
    low = LOW[device]
    wide = jnp.float32 if device == "gpu" else low
    assert dtypes == [low, low, low, low, wide]


@each_device
def test_a_cast_of_the_users_is_a_rounding(device):
    x = activations(1, 20, LOW[device])

    def fn(x, dtype):
        return jnp.mean(jnp.square(x).astype(dtype).astype(jnp.float32))

    coarse = jnp.float8_e4m3fn
    found = jamp.autocast(lambda x: fn(x @ EYE, coarse), device_type=device)(x)
    np.testing.assert_allclose(found, fn(x, coarse), rtol=1e-6)


def layer(x):
    return jnp.sum(x, 0), x @ EYE


def test_a_function_that_takes_16_bits_is_handed_them_for_all_its_readers():
    x = activations(1, 0, jnp.float16)
    policy = jamp.Policy.load("gpu").with_rules(lower=[layer])
    fn = jamp.autocast(lambda x: layer(jax.nn.softmax(x @ EYE)), policy=policy)
    (sums, products), exact = fn(x), jax.nn.softmax(x).astype(jnp.float16)
    np.testing.assert_array_equal(products, exact)
    rounded = exact.astype(jnp.float32).sum(0).astype(jnp.float16)
    np.testing.assert_array_equal(sums, rounded)


def test_what_readers_in_16_bits_have_stays_in_16_bits():
    def fn(x, w):
        hidden = x @ w
        doubled = hidden * 2
        return doubled @ w, doubled.mean()

    program = traced(jamp.autocast(fn), EYE, EYE)
    (product,) = [e for e in equations(program) if e.primitive.name == "mul"]
    assert product.outvars[0].aval.dtype == jnp.bfloat16


@each_device
def test_the_report_says_what_is_computed_in_float32(device):
    report = jamp.explain(lambda x: layer_norm(x @ EYE), device_type=device)(EYE)
    operands = {r.primitive: r.operands for r in report.records}
    assert set(operands["square"]) == set(operands["sqrt"]) == {np.dtype(np.float32)}
