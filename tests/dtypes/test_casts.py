"""Which casts the rewritten program holds, and what decides an operation's dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import casts, dtypes, equations, matmul_dtypes, operand_dtypes, traced

import jamp
from jamp._dtypes import LOW_DTYPES

gpu = functools.partial(jamp.autocast, device_type="gpu")
LOW_PAIR = ("float16", "float16")
NUMBERS = (((1,), (0,)), ((), ()))

x44 = jnp.ones((4, 4))


@jax.jit
def helper(x, w):
    return jnp.tanh(x @ w)


def unrolled(x, w):
    return ((x @ w) @ w) @ w


def through_helper(x, w):
    return helper(helper(helper(x, w), w), w)


def through_both(x, w):
    return helper(x, w) @ w


def down(program):
    return casts(program, "float32", "float16")


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize(
    "own, other, number",
    [("bfloat16", "float16", 2.0**18), ("float16", "bfloat16", 1 + 2.0**-10)],
)
def test_a_cast_to_the_other_16_bit_dtype_loses_what_that_lacks(
    own, other, number, cache_enabled
):
    """Range on the way to float16, digits on the way to bfloat16."""

    def fn(x, w):
        return (x @ w).astype(other) @ w

    cast = jamp.autocast(fn, dtype=own, cache_enabled=cache_enabled)
    held = jnp.float32(number).astype(other)
    ones = jnp.ones((2, 2))
    np.testing.assert_array_equal(cast(number / 2 * ones, ones), 2 * held * ones)


@pytest.mark.parametrize("fn", [unrolled, through_helper, through_both])
def test_a_parameter_used_several_times_is_cast_once(fn):
    x, w = jnp.ones((3, 4)), x44
    found = down(traced(gpu(fn), x, w))
    assert sorted(found) == [
        ("float32", "float16", (3, 4)),
        ("float32", "float16", (4, 4)),
    ]


def test_cache_enabled_false_casts_for_every_use():
    x, w = jnp.ones((3, 4)), x44
    shared = traced(gpu(unrolled), x, w)
    single = traced(gpu(unrolled, cache_enabled=False), x, w)
    weight = ("float32", "float16", (4, 4))
    assert down(shared).count(weight) == 1
    assert down(single).count(weight) == 3
    assert matmul_dtypes(single) == matmul_dtypes(shared)


def test_cache_enabled_false_widens_for_every_use():
    x, residual = x44, jnp.ones((4, 4))

    def fn(x, y):
        h = x @ x
        return (h + y) * (h - y)

    single = traced(gpu(fn, cache_enabled=False), x, residual)
    assert casts(single).count(("float16", "float32", (4, 4))) == 2
    assert dtypes(single.out_avals) == ["float32"]


def test_a_cast_is_shared_between_regions_of_one_dtype():
    def fn(x, w):
        with jamp.autocast():
            y = x @ w
        with jamp.autocast(dtype=jnp.float16):
            return y @ w

    assert len(down(traced(gpu(fn), x44, x44 + 1))) == 2


def test_casts_that_undo_each_other_do_not_appear():
    def fn(x, w):
        y = jnp.exp(x @ w)
        return (y @ w, jnp.exp(y), jnp.log1p(y))

    program = traced(gpu(fn), x44, x44 + 1)
    # Up for exp, down for the second product; exp and log1p read the float32 itself.
    assert casts(program, target="float32") == [("float16", "float32", (4, 4))]
    assert len(down(program)) == 3


def test_a_widened_value_goes_back_without_a_cast():
    def fn(x):
        y = x.astype(jnp.float16)
        return jnp.tanh(jnp.exp(y)), y @ y

    program = traced(gpu(fn), x44)
    assert len(casts(program)) == 2


def test_gradients_of_a_shared_cast_add_up_in_float32():
    total = lambda w: gpu(unrolled)(x44, w).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.grad(total)(x44)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(
        gradient, jax.grad(lambda w: unrolled(x44, w).sum())(x44)
    )


@pytest.mark.parametrize("device, dtype", [("gpu", jnp.float16), ("cpu", jnp.bfloat16)])
@pytest.mark.parametrize("parameter", ["bias", "scalar", "row"])
def test_gradients_of_a_broadcast_parameter_add_up_in_float32(device, dtype, parameter):
    rows = 20_000
    x, w = jnp.ones((rows, 2)), jnp.eye(2)
    combine, value = {
        "bias": (lambda y, p: y + p, jnp.zeros(2)),
        "scalar": (lambda y, p: y * p, jnp.float32(1)),
        "row": (lambda y, p: y + p, jnp.zeros((1, 2))),
    }[parameter]

    def total(value):
        fn = jamp.autocast(
            lambda value: combine(x @ w, value), device_type=device, dtype=dtype
        )
        return jnp.sum(fn(value).astype(jnp.float32)) / 4

    gradient = jax.jit(jax.grad(total))(value)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(
        gradient, jax.grad(lambda p: jnp.sum(combine(x @ w, p)) / 4)(value), rtol=1e-2
    )


EXPLICIT = {
    "precision highest": lambda x, w: jnp.matmul(x, w, precision="highest"),
    "precision high": lambda x, w: jnp.einsum("ij,jk", x, w, precision="high"),
    "pair of precisions": lambda x, w: jax.lax.dot(
        x, w, precision=("highest", "default")
    ),
    "algorithm": lambda x, w: jax.lax.dot(
        x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32
    ),
}


@pytest.mark.parametrize("fn", EXPLICIT.values(), ids=EXPLICIT)
def test_an_explicit_precision_stays(fn):
    program = traced(gpu(fn), x44, x44)
    assert matmul_dtypes(program) == [("float32", "float32")]
    (record,) = [r for r in jamp.explain(fn)(x44, x44).records if r.flops]
    assert "precision" in record.ruling.source


def test_an_explicit_precision_of_a_convolution_stays():
    fn = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME", precision="highest")  # noqa: E731
    program = traced(gpu(fn), jnp.ones((1, 2, 5, 5)), jnp.ones((3, 2, 3, 3)))
    assert matmul_dtypes(program) == [("float32", "float32")]


def test_the_default_precision_is_not_an_explicit_one():
    fn = lambda x, w: jnp.matmul(x, w, precision="default")  # noqa: E731
    assert matmul_dtypes(traced(gpu(fn), x44, x44)) == [LOW_PAIR]


def test_a_result_wider_than_16_bit_operands_stays():
    fn = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=NUMBERS,
        preferred_element_type=jnp.float32,
    )
    x = x44.astype(jnp.float16)
    program = traced(gpu(fn), x, x)
    assert program.out_avals[0].dtype == jnp.float32
    assert matmul_dtypes(program) == [LOW_PAIR]


def test_a_float64_operand_runs_as_traced():
    with jax.enable_x64(True):
        x, y = jnp.ones((2, 2), jnp.float64), jnp.ones((2, 2), jnp.float32)
        fn = gpu(lambda x, y: (x @ x, x @ y, x + y @ y, y @ y))
        assert [r.dtype.name for r in fn(x, y)] == [*["float64"] * 3, "float16"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.array([x]),
        lambda x: x.astype(jnp.float32),
    ],
    ids=["list", "astype"],
)
def test_a_number_that_is_made_float32_is_no_weak_one(fn):
    assert not jax.jit(fn)(2.0).weak_type
    assert not jax.jit(gpu(fn))(2.0).weak_type


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_gradients_inside_do_not_depend_on_how_weak_a_value_is(dtype):
    def fn(t):
        turned = 1j * t if dtype == "complex64" else t
        products = (turned * jnp.ones(4, dtype)) @ jnp.full((4, 4), 0.3, dtype)
        return jnp.sum(jnp.sin(products).real)

    with jax.enable_x64(dtype == "float64"):
        weak = jnp.arange(4) * 0.1
        strong = weak * jnp.ones(4, weak.dtype)
        results = [gpu(jax.grad(fn))(t) for t in (weak, strong)]
        assert weak.weak_type and results[0].dtype == results[1].dtype
        expected = jax.grad(fn)(strong)
        assert results[1].dtype == ("float16" if dtype == "float32" else weak.dtype)
        tolerance = 1e-12 if dtype == "float64" else 2e-3
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=tolerance)


UNTOUCHED = {
    "integers": (lambda x: x @ x, jnp.ones((2, 2), jnp.int32)),
    "booleans": (lambda x: x & x, jnp.ones((2, 2), bool)),
    "complex": (lambda x: jnp.exp(x @ x), jnp.ones((2, 2), jnp.complex64)),
    "complex sum": (lambda x: jnp.exp(x) - 1, jnp.ones((2, 2), jnp.complex64)),
    "complex constant": (
        lambda x: x * jnp.where(x.real > 0, 2.0, 1.0).astype(x.dtype),
        jnp.ones((2, 2), jnp.complex64),
    ),
    "fft": (lambda x: jnp.fft.fft(x), jnp.ones(4, jnp.complex64)),
}


@pytest.mark.parametrize("fn, x", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_is_not_floating_point_is_left_alone(fn, x):
    for device in ("gpu", "cpu"):
        under_autocast = jamp.autocast(fn, device_type=device)
        result = under_autocast(x)
        assert result.dtype == x.dtype
        np.testing.assert_allclose(result, fn(x), rtol=1e-6)
        assert casts(traced(under_autocast, x)) == []


def test_random_keys_pass_and_draw_the_same_numbers():
    fn = lambda key: jax.random.normal(jax.random.split(key)[0], (3,))  # noqa: E731
    key = jax.random.key(0)
    np.testing.assert_allclose(gpu(fn)(key), fn(key), rtol=1e-5)
    assert gpu(lambda key: key)(key).dtype == key.dtype


# What the distributions of jax.random are given beside a key and a dtype.
RANDOM = (
    ((), "cauchy exponential gumbel laplace logistic maxwell normal uniform"),
    ((2.0,), "chisquare gamma generalized_normal lognormal pareto rayleigh t wald"),
    ((2.0, 3.0), "beta f weibull_min"),
    ((-1.0, 1.0), "truncated_normal"),
    ((3,), "ball"),
    ((np.ones(3, np.float32),), "dirichlet"),
)


@pytest.mark.numbers
def test_random_numbers_are_those_that_were_asked_for():
    def draws(key):
        return [
            getattr(jax.random, name)(key, *arguments, dtype=dtype)
            for arguments, names in RANDOM
            for name in names.split()
            for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
        ]

    key = jax.random.key(0)
    for actual, expected in zip(gpu(draws)(key), draws(key), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16])
def test_other_narrow_types_are_cast_to_the_dtype_in_force(dtype):
    x = x44.astype(dtype)
    assert matmul_dtypes(traced(gpu(lambda x: x @ x), x)) == [LOW_PAIR]
    assert gpu(lambda x: x @ x)(x).dtype == jnp.float16
    assert gpu(jnp.exp)(x).dtype == jnp.float32


def test_the_users_own_cast_is_made():
    def fn(x):
        y = x @ x
        return (
            y.astype(jnp.bfloat16),
            jnp.asarray(y, jnp.bfloat16),
            jax.lax.convert_element_type(y, jnp.bfloat16),
            y.astype(jnp.int32),
            y.astype(jnp.complex64),
        )

    names = ["bfloat16"] * 3 + ["int32", "complex64"]
    assert list(dtypes(gpu(fn)(x44))) == names


def test_the_users_own_way_back_to_float32_is_made():
    x = x44.astype(jnp.float16)
    assert gpu(lambda x: (x @ x).astype(jnp.float32))(x).dtype == jnp.float32


def test_promotion_of_mixed_operands_is_no_cast():
    # Traced, the 16-bit x is widened to meet w; rewritten, both are 16-bit.
    program = traced(gpu(lambda x, w: x @ w), x44.astype(jnp.float16), x44)
    assert matmul_dtypes(program) == [LOW_PAIR]
    assert casts(program) == [("float32", "float16", (4, 4))]


@pytest.mark.parametrize(
    "fn",
    [
        lambda y, z: jnp.concatenate([y, z]),
        lambda y, z: jnp.stack([y, z]),
        lambda y, z: jnp.where(y > 0, y, z),
        lambda y, z: jnp.maximum(y, z),
        lambda y, z: y + z,
        lambda y, z: y.at[0].set(z[0]),
        lambda y, z: y.at[0].add(z[0]),
        lambda y, z: jnp.arctan2(y, z),
    ],
)
def test_operands_meet_at_the_widest_dtype(fn):
    mixed = traced(gpu(lambda x, z: fn(x @ x, z)), x44, x44 + 1)
    assert mixed.out_avals[0].dtype == jnp.float32
    narrow = traced(gpu(lambda x: fn(x @ x, x @ x * 2)), x44)
    assert narrow.out_avals[0].dtype == jnp.float16
    np.testing.assert_allclose(
        gpu(lambda x, z: fn(x @ x, z))(x44, x44 + 1), fn(x44 @ x44, x44 + 1), rtol=1e-3
    )


@pytest.mark.parametrize("fn", [jax.device_put, jax.lax.optimization_barrier])
def test_what_only_passes_side_by_side_keeps_its_dtype(fn):
    program = traced(gpu(lambda x: fn((x @ x, x))), x44)
    assert [aval.dtype for aval in program.out_avals] == [jnp.float16, jnp.float32]


def test_low_and_other_low_meet_at_float32():
    fn = gpu(lambda x: (x @ x) + (x @ x).astype(jnp.bfloat16))
    assert fn(x44).dtype == jnp.float32


def test_what_comes_in_the_other_16_bits_is_read_in_both():
    w, h = x44, jnp.ones((4, 4), jnp.bfloat16)
    found = gpu(lambda h: h @ w + h)(h)
    np.testing.assert_array_equal(found, jnp.float32(h) @ w + 1)
    assert found.dtype == jnp.float32


def test_no_operation_mixes_dtypes():
    def fn(x, w, b):
        y = jax.nn.relu(x @ w + b)
        return jnp.concatenate([y, x]) * jnp.exp(b) + jax.nn.softmax(y).sum()

    program = traced(gpu(fn), x44, x44 + 1, jnp.ones(4))
    for name in {eqn.primitive.name for eqn in equations(program)}:
        if name in ("select_n", "jit", "custom_jvp_call", "gather", "remat2"):
            continue
        for found in operand_dtypes(program, name):
            assert len({dtype for dtype in found if "float" in dtype}) <= 1


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_every_low_dtype_is_one_to_compute_in(dtype):
    fn = jamp.autocast(lambda x, w: jnp.tanh(x @ w).sum(), dtype=dtype)
    program = traced(jax.value_and_grad(fn, argnums=(0, 1)), x44, x44)
    assert matmul_dtypes(program) == [(dtype.name, dtype.name)] * 3


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_integers_and_booleans_are_sliced_at_constant_indices(dtype):
    def fn(given):
        made = jax.lax.full((3, 4), 1, dtype)
        sliced = [jax.lax.dynamic_slice(x, (0, 1), (2, 2)) for x in (given, made)]
        return sliced[0] == sliced[1]

    given = jnp.arange(12).reshape(3, 4).astype(dtype)
    np.testing.assert_array_equal(jamp.autocast(fn)(given), given[0:2, 1:3] == 1)
