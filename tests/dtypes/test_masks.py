"""Masks, large and tiny constants, and scalars beside 16-bit arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import casts, equations, operand_dtypes, traced

import jamp

autocast = functools.partial(jamp.autocast, device_type="gpu", dtype=jnp.float16)

FINFO_MIN = float(np.finfo(np.float32).min)

MASKINGS = {
    "add -1e9": lambda s, m: s + (1 - m.astype(jnp.float32)) * -1e9,
    "subtract 1e30": lambda s, m: s - (1.0 - m) * 1e30,
    "where -1e9": lambda s, m: jnp.where(m, s, -1e9),
    "where -1e4": lambda s, m: jnp.where(m, s, -1e4),
    "where float32 min": lambda s, m: jnp.where(m, s, FINFO_MIN),
    "where finfo of scores": lambda s, m: jnp.where(m, s, jnp.finfo(s.dtype).min),
    "where -inf": lambda s, m: jnp.where(m, s, -jnp.inf),
    "select full": lambda s, m: jax.lax.select(m, s, jnp.full_like(s, -1e9)),
    "additive mask": lambda s, m: s + jnp.where(m, 0.0, -1e9),
    "additive float32 min": lambda s, m: s + jnp.where(m, 0.0, FINFO_MIN),
    "additive -inf": lambda s, m: s + jnp.where(m, 0.0, -jnp.inf),
    "multiplied finfo": lambda s, m: s + (1.0 - m) * jnp.finfo(jnp.float32).min,
}

SOFTMAXES = {
    "library": jax.nn.softmax,
    "by hand": lambda s: (
        (e := jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))))
        / e.sum(-1, keepdims=True)
    ),
}

every_masking = pytest.mark.parametrize("masking", MASKINGS)
every_softmax = pytest.mark.parametrize("softmax", SOFTMAXES)


def attention(masking, softmax):
    """Attention of one head, with queries large enough to matter."""

    def attend(x, w, mask):
        scores = MASKINGS[masking]((x @ w) @ x.T, mask)
        return SOFTMAXES[softmax](scores) @ x

    return attend


def as_written(fn):
    return fn


def inputs(fully_masked=False):
    """Values, weights and a mask, with or without a row that hides everything."""
    rng = np.random.default_rng(0)
    mask = rng.random((5, 5)) < 0.6
    np.fill_diagonal(mask, True)
    if fully_masked:
        mask[2] = False
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return draw(5, 8), draw(8, 8), jnp.asarray(mask)


@functools.cache
def forward_and_backward(masking, softmax, transform):
    """Compiled: the result and the gradients of a weighted sum of it."""
    fn = transform(attention(masking, softmax))
    weights = jnp.cos(jnp.arange(40.0)).reshape(5, 8)

    def total(x, w, mask):
        return jnp.sum(fn(x, w, mask).astype(jnp.float32) * weights)

    return jax.jit(lambda *args: [fn(*args), *jax.grad(total, (0, 1))(*args)])


def assert_finite_where(actual, expected):
    """Finite wherever the reference is, and near it there."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        finite = np.isfinite(y)
        assert np.isfinite(x[finite]).all()
        scale = max(np.abs(y[finite]).max(initial=0), 1.0)
        assert np.abs(x[finite] - y[finite]).max(initial=0) <= 0.02 * scale


def test_the_comparison_notices_what_only_one_side_has():
    y = [np.ones(3)]
    assert_finite_where(y, y)
    assert_finite_where([np.array([1, 1, np.nan])], [np.array([1, 1, np.inf])])
    for wrong in ([1, np.nan, 1], [1, -np.inf, 1], [1, 1.1, 1]):
        with pytest.raises(AssertionError):
            assert_finite_where([np.array(wrong)], y)


@pytest.mark.numbers
@pytest.mark.parametrize("fully_masked", [False, True], ids=["some", "whole row"])
@every_softmax
@every_masking
def test_masked_attention_is_finite_wherever_float32_is(masking, softmax, fully_masked):
    arguments = inputs(fully_masked)
    expected = forward_and_backward(masking, softmax, as_written)(*arguments)
    actual = forward_and_backward(masking, softmax, autocast)(*arguments)
    assert_finite_where(actual, expected)


@every_masking
def test_masked_attention_still_multiplies_in_16_bits(masking):
    fn = autocast(attention(masking, "library"))
    found = operand_dtypes(traced(fn, *inputs()), "dot_general")
    assert found == [("float16", "float16")] * 3


@every_masking
def test_no_float16_infinity_that_float32_does_not_have_is_ever_made(masking):
    x, w, mask = inputs()
    program = traced(autocast(attention(masking, "by hand")), x, w, mask)
    if "inf" in masking:
        return
    literals = [
        var.val
        for eqn in equations(program)
        for var in eqn.invars
        if hasattr(var, "val") and np.asarray(var.val).dtype == np.float16
    ]
    assert np.isfinite(np.asarray(literals, np.float32)).all()


@pytest.mark.parametrize("constant", [1e-8, 1e-12, 1e5, -1e9, FINFO_MIN, 3e38])
@pytest.mark.parametrize("form", ["literal", "filled", "numpy scalar"])
def test_a_constant_that_float16_would_destroy_widens_the_operation(constant, form):
    value = {
        "literal": lambda y: constant,
        "filled": lambda y: jnp.full(y.shape, constant),
        "numpy scalar": lambda y: np.float32(constant),
    }[form]
    x = jnp.ones((2, 2))
    result = autocast(lambda x: (y := x @ x) + value(y))(x)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.float32(2) + np.float32(constant))


@pytest.mark.parametrize("constant", [1e-8, 1e5, -1e9])
def test_one_of_many_constants_that_float16_would_destroy_is_kept(constant):
    def shifted(x):
        others = [float(number) for number in range(-3, 67) if number]
        numbers = [lax.full((1,), number) for number in (constant, *others)]
        return x @ x + lax.concatenate(numbers, 0)

    result = autocast(shifted)(jnp.ones((70, 70)))
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result[:, 0], np.float32(70) + np.float32(constant))


def test_an_epsilon_keeps_a_division_finite():
    def normalise(x, w):
        y = x @ w
        return y / (jnp.sqrt((y * y).sum(-1, keepdims=True)) + 1e-8)

    x, w = jnp.zeros((2, 4)), jnp.ones((4, 4))
    result = autocast(normalise)(x, w)
    np.testing.assert_array_equal(result, jnp.zeros((2, 4)))


@pytest.mark.parametrize("operation", ["add", "multiply", "maximum", "where", "clip"])
def test_an_epsilon_is_not_rounded_to_zero(operation):
    operations = {
        "add": lambda y: y + 1e-8,
        "multiply": lambda y: y * 1e-8,
        "maximum": lambda y: jnp.maximum(y, 1e-8),
        "where": lambda y: jnp.where(y > 0, y, 1e-8),
        "clip": lambda y: jnp.clip(y, 1e-8, 1.0),
    }
    fn = operations[operation]
    x, w = jnp.zeros((2, 2)), jnp.ones((2, 2))
    x = x + 1 if operation == "multiply" else x
    result = autocast(lambda x, w: fn(x @ w))(x, w)
    np.testing.assert_array_equal(result, fn(x @ w))
    assert np.count_nonzero(result) == 4


LITERALS = {
    "product": lambda y: y * 0.5,
    "difference": lambda y: 1 - y,
    "quotient": lambda y: y / 3,
    "maximum and sum": lambda y: jnp.maximum(y, 0.0) + 6.0,
    "clip": lambda y: jnp.clip(y, -1e4, 1e4),
    "smallest number": lambda y: y + 2.0**-24,
    "largest number": lambda y: y - 65504.0,
    "where with a product": lambda y: jnp.where(y > 0, y, 0.25 * y),
    "pad": lambda y: jnp.pad(y, 1),
    "pad with a value": lambda y: jnp.pad(y, 1, constant_values=0.5),
}
FILLS = {
    "where 0": lambda y: jnp.where(y > 0, y, 0.0),
    "where integer": lambda y: jnp.where(y > 0, y, 0),
    "where -1e4": lambda y: jnp.where(y > 0, y, -1e4),
    "where -inf": lambda y: jnp.where(y > 0, y, -jnp.inf),
    "zeros": lambda y: y + jnp.zeros_like(y),
    "ones": lambda y: y * jnp.ones(4),
    "row of ones": lambda y: y - jnp.ones((1, 4)) * 2,
    "triangle": lambda y: jnp.tril(y),
    "identity": lambda y: y * jnp.eye(4),
    "one hot": lambda y: y * jax.nn.one_hot(1, 4),
}


@pytest.mark.parametrize("program", LITERALS.values(), ids=LITERALS)
def test_a_literal_that_fits_stays_16_bit_and_costs_no_cast(program):
    x = jnp.ones((4, 4))
    jaxpr = traced(autocast(lambda x: program(x @ x)), x)
    assert jaxpr.out_avals[0].dtype == jnp.float16
    # The one cast of an array that there is brings the argument to 16 bits.
    arrays = [cast for cast in casts(jaxpr) if cast[2]]
    assert arrays == [("float32", "float16", (4, 4))]


@pytest.mark.parametrize("program", FILLS.values(), ids=FILLS)
def test_an_array_filled_with_a_constant_that_fits_stays_16_bit(program):
    x = jnp.ones((4, 4))
    jaxpr = traced(autocast(lambda x: program(x @ x)), x)
    assert jaxpr.out_avals[0].dtype == jnp.float16
    assert casts(jaxpr, target=jnp.float32) == []


RIDGES = {
    "identity": lambda y: y + jnp.eye(4),
    "multiple of it": lambda y: 3e-2 * jnp.eye(4) + y,
    "difference": lambda y: jnp.eye(4) - y,
    "diagonal of ones": lambda y: y + jnp.diag(jnp.ones(4)),
    "first of a row": lambda y: y + 0.1 * (jnp.arange(4) == 0),
    "-63": lambda y: y + jnp.where(jnp.tri(4, dtype=bool), 0.0, -63.0),
}


@pytest.mark.parametrize("program", RIDGES.values(), ids=RIDGES)
def test_a_table_of_small_constants_promotes_as_in_torch(program):
    x = jnp.ones((4, 4))
    jaxpr = traced(autocast(lambda x: program(x @ x)), x)
    assert jaxpr.out_avals[0].dtype == jnp.float32


HIDING = {
    "-inf": lambda y: y + jnp.where(jnp.tri(4, dtype=bool), 0.0, -jnp.inf),
    "-1e4": lambda y: y - 1e4 * (1 - jnp.tri(4)),
    "-64": lambda y: y + jnp.where(jnp.tri(4, dtype=bool), 0.0, -64.0),
    "NaN": lambda y: y + jnp.where(jnp.tri(4, dtype=bool), 7.0, jnp.nan),
}


@pytest.mark.parametrize("program", HIDING.values(), ids=HIDING)
def test_a_table_that_hides_what_it_is_added_to_does_not_promote(program):
    x = jnp.ones((4, 4))
    jaxpr = traced(autocast(lambda x: program(x @ x)), x)
    assert jaxpr.out_avals[0].dtype == jnp.float16


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_ridge_keeps_a_matrix_positive_whoever_else_reads_it(device):
    def factors(x):
        kernel = x @ x.T + 3e-2 * jnp.eye(12)
        return jnp.linalg.cholesky(kernel), kernel

    x = jax.random.normal(jax.random.key(1), (12, 4))
    assert np.isfinite(jamp.autocast(factors, device_type=device)(x)[0]).all()


@pytest.mark.parametrize(
    "masked",
    [
        lambda y, m: y * m,
        lambda y, m: m * y,
        lambda y, m: y * m.astype(jnp.float32),
        lambda y, m: jnp.where(m, y, 0),
        lambda y, m: y + (1 - m.astype(jnp.float32)),
        lambda y, m: jnp.where(m, y / 0.9, 0.0),
    ],
)
def test_a_boolean_mask_times_activations_stays_16_bit(masked):
    x, mask = jnp.ones((4, 4)), jnp.eye(4, dtype=bool)
    result = autocast(lambda x, m: masked(x @ x, m))(x, mask)
    assert result.dtype == jnp.float16
    expected = masked(x @ x, mask)
    np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [65536.0, 1e6, 2.0**-30])
def test_a_runtime_scalar_out_of_range_keeps_the_dtype_and_the_value(scale):
    fn = lambda x, w, s: (x @ w) * s  # noqa: E731
    x = jnp.full((2, 2), 0.5 / scale) if scale > 1 else jnp.full((2, 2), 0.5)
    w = jnp.eye(2) if scale > 1 else jnp.eye(2) * 2.0**15
    result = autocast(fn)(x, w, jnp.float32(scale))
    assert result.dtype == jnp.float16
    expected = fn(x.astype(jnp.float16).astype(jnp.float32), w, scale)
    np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=1e-3)
    assert np.isfinite(result).all()


@pytest.mark.parametrize(
    "combine",
    [
        lambda y, s: y + s,
        lambda y, s: s - y,
        lambda y, s: y / s,
        lambda y, s: jnp.maximum(y, s),
        lambda y, s: jnp.where(y > s, y, s),
    ],
)
def test_a_runtime_scalar_does_not_widen_an_array(combine):
    x = jnp.ones((2, 2))
    assert autocast(lambda x, s: combine(x @ x, s))(x, jnp.float32(2)).dtype == (
        jnp.float16
    )


def test_two_runtime_scalars_keep_their_float32():
    fn = autocast(lambda x, s, t: ((x @ x)[0, 0] * 1, s * t))
    low, wide = fn(jnp.ones((2, 2)), jnp.float32(3), jnp.float32(5))
    assert low.dtype == jnp.float16
    assert wide.dtype == jnp.float32


def test_a_loss_scale_reaches_the_gradients_without_overflow():
    def loss(w, x, scale):
        y = autocast(lambda w, x: jnp.tanh(x @ w))(w, x)
        return jnp.mean(y.astype(jnp.float32)) * scale

    w, x = jnp.eye(4) * 1e-3, jnp.ones((3, 4))
    scaled = jax.grad(loss)(w, x, jnp.float32(65536.0)) / 65536.0
    np.testing.assert_allclose(scaled, jax.grad(loss)(w, x, 1.0), rtol=2e-2)
    assert scaled.dtype == jnp.float32
