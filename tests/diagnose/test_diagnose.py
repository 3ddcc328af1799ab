"""`jamp.diagnose`: what it measures, through which constructs, and how it reports."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diagnosed import EYE, X, diagnose, line_of, mean, product, square

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")


def in_scan(h):
    return jax.lax.scan(lambda c, _: (square(c) / 300, None), h, None, length=2)[0]


def in_while(h):
    def body(state):
        return state[0] + 1, square(state[1]) / 300

    return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, h))[1]


def in_branch_of_a_loop(h):
    def body(i, c):
        return jax.lax.cond(i == 1, square, lambda c: c, c)

    return jax.lax.fori_loop(0, 3, body, h)


@jax.custom_vjp
def with_vjp(h):
    return square(h)


with_vjp.defvjp(lambda h: (with_vjp(h), h), lambda h, g: (2 * g * h,))


@jax.custom_jvp
def with_jvp(h):
    return square(h)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))

CONSTRUCTS = {
    "plainly": square,
    "in jit": jax.jit(square),
    "in a checkpoint": jax.checkpoint(square),
    "in a cond": lambda h: jax.lax.cond(h[0, 0] > 0, square, jnp.sin, h),
    "in a scan": in_scan,
    "in a while loop": in_while,
    "in a branch of a loop": in_branch_of_a_loop,
    "in a vmap": jax.vmap(square),
    "in a custom_jvp": with_jvp,
    "in a custom_vjp": with_vjp,
}


# JAX does not differentiate a while loop backward.
each_with_a_gradient = pytest.mark.parametrize(
    "construct", [name for name in CONSTRUCTS if name != "in a while loop"]
)


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_an_overflow_is_found(construct):
    def fn(x):
        return mean(CONSTRUCTS[construct](product(x)))

    (finding,) = diagnose(fn)(X).findings
    assert (finding.kind, finding.operation) == ("overflow", "mul")
    assert (finding.location.line, finding.gradient) == (line_of(square), False)


@each_with_a_gradient
def test_it_is_found_where_the_gradient_is_taken_too(construct):
    def fn(x):
        return mean(CONSTRUCTS[construct](product(x)))

    findings = diagnose(fn, loss_scale=1.0)(X).findings
    assert {finding.kind for finding in findings} == {"overflow"}


@each_with_a_gradient
def test_what_fits_is_healthy(construct):
    def fn(x):
        return mean(CONSTRUCTS[construct](product(x)))

    assert diagnose(fn, loss_scale=2.0**12)(X / 30).healthy


def test_the_iteration_of_an_overflow_is_told():
    def fn(x):
        start = product(x)
        threes = 3 * jnp.sign(start)
        return jax.lax.scan(lambda c, _: (c * threes, None), start, None, length=20)[0]

    # 300 * 3^5 is 72900, and the largest number of float16 65504.
    (finding,) = diagnose(fn)(X).findings
    assert finding.iteration == 4
    assert "first in iteration 4" in str(finding)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_errors_are_those_of_the_compiled_programs(dtype):
    def fn(w, x):
        return {"out": jnp.tanh(x @ w) @ w, "sum": jnp.sum(x @ w)}

    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 32, 32)).astype(np.float32)
    errors = diagnose(fn, dtype=dtype)(w, x).errors
    exactly = {"xla_allow_excess_precision": False}
    low = jax.jit(
        jamp.autocast(fn, device_type="gpu", dtype=dtype), compiler_options=exactly
    )(w, x)
    full = jax.jit(fn)(w, x)
    for name in full:
        a, b = np.asarray(low[name], np.float64), np.asarray(full[name], np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert errors[f"result['{name}']"] == pytest.approx(error, rel=0.01)


def loops(w, x, key):
    def step(carry, slices):
        h, count = carry
        row, key = slices
        h = jax.lax.fori_loop(0, count, lambda i, h: jnp.tanh(h @ w), h)
        return (h, count + 1), (h @ row, h[0] + jax.random.uniform(key))

    first, keys = (x, 1), jax.random.split(key, 3)
    (h, _), ys = jax.lax.scan(step, first, (w[:3], keys), reverse=True)
    none = jax.lax.scan(lambda c, _: (c, jnp.sin(c)), h @ w, None, length=0)
    return {"h": h, "products": ys[0], "sums": ys[1], "none": none[0]}, none[1]


def test_what_loops_return_is_that_of_compiled_ones():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 8, 8)).astype(np.float32)
    args = w, x, jax.random.key(0)
    errors = diagnose(loops)(*args).errors
    low = jax.jit(jamp.autocast(loops, device_type="gpu"))(*args)[0]
    full = jax.jit(loops)(*args)[0]
    assert list(errors) == [f"result[0]['{name}']" for name in full]
    for name in full:
        a, b = np.asarray(low[name], np.float64), np.asarray(full[name], np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert errors[f"result[0]['{name}']"] == pytest.approx(error, rel=0.1)


def line_with(part, fn):
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if part in line)


def test_of_lines_that_compute_the_same_the_one_at_fault_is_told():
    def fn(x):
        small = x / 300
        a = jnp.exp(product(small))
        b = jnp.exp(product(x))
        return jnp.mean(a @ EYE) + jnp.mean(b @ EYE)

    (finding,) = diagnose(fn)(X).findings
    assert finding.operation == "exp"
    assert finding.location.line == line_with("b =", fn)


def test_what_a_reader_rounds_is_told_at_the_line_that_computed_it():
    def fn(x):
        large = x * 1e5
        return jnp.mean((large @ EYE) * 1e-5)

    (finding,) = diagnose(fn)(X).findings
    assert finding.location.line == line_with("large =", fn)
    reader = line_with("@", fn)
    assert f"mul rounded to float16 for line {reader} is not finite" in str(finding)


def test_an_overflow_without_harm_is_no_finding():
    def fn(x):
        return jnp.minimum(square(product(x)), 100.0)

    assert diagnose(fn)(X).healthy


def test_what_is_not_finite_in_float32_is_told_apart():
    def fn(x):
        shifted = x - 1
        return jnp.sum(jnp.log(shifted))

    diagnosis = diagnose(fn)(X)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.operation) == ("float32", "log")
    assert finding.location.line == line_of(fn)
    assert diagnosis.suggestions == ()


def test_an_argument_that_is_not_finite_is_named():
    def fn(x, params):
        return product(x) @ params["w"]

    params = {"w": np.full((8, 8), np.nan, "f")}
    (finding,) = diagnose(fn)(X, params).findings
    assert (finding.kind, finding.operation) == ("float32", "argument")
    assert "argument args[1]['w'] is not finite" in str(finding)
    assert "unknown location" not in str(finding)


def test_a_constant_that_is_not_finite_is_told():
    constant = np.full((8, 8), np.nan, "f")
    (finding,) = diagnose(lambda x: product(x) @ constant)(X).findings
    assert "an argument or a constant is not finite" in str(finding)


def test_derivatives_of_library_functions_are_told_at_the_line_of_the_call():
    def fn(x):
        return jnp.sum(product(jax.nn.relu(product(x))) * 1e-9)

    found = diagnose(fn, loss_scale=1.0)(X)
    gates = [u for u in found.underflows if u.operation == "select_n"]
    assert [u.location.line for u in gates] == [line_of(fn)]
    assert "unknown" not in {histogram.module for histogram in found.histograms}


def test_what_is_divided_by_twice_is_blamed_once():
    def fn(x, eps):
        h = x @ EYE
        safe = (h + eps) @ np.ones((8, 1), np.float32)
        a = x / safe
        b = h / safe
        return jnp.sum(a) + jnp.sum(b)

    rows = X.copy()
    rows[3] = 0
    (finding,) = diagnose(fn)(rows, np.float32(1e-8)).findings
    assert finding.kind == "underflow"


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_difference_that_rounding_makes_zero_is_no_underflow(dtype):
    def fn(x):
        h = product(x)
        return jnp.sum((h + 0.01) - h) + jnp.sum(h)

    assert diagnose(fn, dtype=dtype)(X).underflows == ()


@pytest.mark.parametrize(("lost", "told"), [(1, False), (2, True)])
def test_what_less_than_one_in_a_hundred_is_lost_of_is_no_underflow(lost, told):
    x = np.ones((16, 8), np.float32)
    x.flat[:lost] = 1e-4  # of 128 numbers: its square is below the least of float16
    fn = lambda x: product(product(x) ** 2)  # noqa: E731
    assert bool(diagnose(fn)(x).underflows) == told


def first_fault(h):
    return h * h


def second_fault(h):
    return h @ (1000 * EYE)


def test_two_faults_take_a_change_for_each():
    def fn(x):
        h, k = product(x), product(x) @ EYE
        a = jnp.minimum(h / first_fault(h), 1)
        return jnp.sum(a) + jnp.mean(second_fault(k)), mean(first_fault(h))

    diagnosis = diagnose(fn)(X)
    (suggestion,) = diagnosis.suggestions
    assert "first_fault" in suggestion.code
    assert "second_fault" in suggestion.code
    cured = jamp.autocast(fn, device_type="gpu", **suggestion.options)(X)
    np.testing.assert_allclose(cured, fn(X), rtol=0.01)


def test_the_users_own_policy_is_derived_from():
    policy = jamp.Policy.load("gpu").with_rules(lower=["jax.nn.softmax"])
    (suggestion,) = diagnose(lambda x: mean(square(product(x))), policy=policy)(
        X
    ).suggestions
    assert suggestion.code.startswith("policy = policy.with_rules(float32=[")
    assert suggestion.cured
    assert suggestion.options["policy"].rule(function="jax.nn.softmax").value == "lower"


def test_a_listed_function_goes_back_to_float32():
    policy = jamp.Policy.load("gpu").with_rules(lower=["jax.numpy.sum"])
    diagnosis = diagnose(lambda x: jnp.sum(product(x) * 30), policy=policy)(X)
    assert "jax.numpy.sum" in diagnosis.suggestions[0].code


def test_the_terms_of_a_loss_may_be_shared_by_many_sums():
    def fn(x):
        a = b = mean(product(x)) * 1e-12
        for _ in range(60):  # so many times that there are a million million paths
            a, b = b, a + b
        return b

    assert diagnose(fn, loss_scale=1.0)(X).healthy


def test_the_gradient_is_of_argnums():
    def fn(x, scale, w):
        return jnp.mean(product(x) @ w * scale), {"seen": x}

    diagnosis = diagnose(fn, loss_scale=1.0, argnums=(1, 2), has_aux=True)(
        X, np.float32(2), EYE
    )
    gradients = ["gradient of args[1]", "gradient of args[2]"]
    assert list(diagnosis.errors) == ["loss", "aux['seen']", *gradients]


def test_the_gradient_of_a_partial_is_of_what_is_left():
    def fn(w, x):
        return jnp.mean(x @ w)

    errors = diagnose(functools.partial(fn, EYE), loss_scale=1.0)(X).errors
    assert list(errors) == ["loss", "gradient of args[1]"]


def test_float64_integers_and_keys_are_left_alone():
    def fn(x, indices, key):
        h = product(x)[indices] + jax.random.normal(key, (3, 8))
        return h.astype(jnp.int32), jnp.argmax(h), jnp.mean(h)

    assert diagnose(fn)(X, np.array([0, 2, 4]), jax.random.key(0)).healthy


def test_a_rounding_that_the_user_wrote_is_made_beside_float32_too():
    def fn(x):
        coarse = jax.lax.reduce_precision(x, 5, 2)
        return jnp.mean(coarse - x)

    assert diagnose(fn)(X).errors == {"result": 0}
    (finding,) = diagnose(fn)(X * 1e3).findings
    assert (finding.kind, finding.operation) == ("float32", "reduce_precision")


def test_what_is_drawn_anew_each_time_is_drawn_once():
    fn = lambda x: product(jax.lax.rng_uniform(0.0, 1.0, (8, 8)) + x)  # noqa: E731
    assert diagnose(fn)(X / 300).healthy


def test_of_a_function_under_autocast_its_options_hold():
    def fn(x):
        return mean(square(product(x)))

    found = jamp.diagnose(gpu(fn), progress=False)(X)
    assert str(found) == str(diagnose(fn)(X))
    assert "with_rules" in str(found)
    policy = jamp.Policy.load("gpu").with_rules(float32=["mul"])
    under = jamp.autocast(fn, dtype=jnp.float16)
    found = jamp.diagnose(under, policy=policy, progress=False)(X)
    assert found.healthy
    assert found.dtype == "float16"


def test_autocast_that_is_off_is_healthy():
    assert diagnose(lambda x: square(product(x)), enabled=False)(X * 1e3).healthy


@pytest.mark.parametrize("scale", [0.8, 0.9, 1.0])
def test_a_result_that_cancels_in_products_is_wrong_where_float32_holds_it(scale):
    """The mean variance of a sparse Gaussian process, by the inverse of its kernel."""

    def kernel(a, b):
        return jnp.exp(-0.5 * jnp.sum(((a[:, None] - b) / scale) ** 2, -1))

    def variance(z):
        lower = jnp.linalg.cholesky(kernel(z, z) + 3e-3 * jnp.eye(12))
        inverse = jax.scipy.linalg.cho_solve((lower, True), jnp.eye(12))
        mixed = kernel(jnp.linspace(-3, 3, 60)[:, None], z)
        return jnp.mean(jnp.diagonal(mixed @ (inverse @ inverse.T) @ mixed.T))

    z = jnp.linspace(-3, 3, 12)[:, None]
    found = jamp.diagnose(variance, device_type="cpu", progress=False)(z)
    assert [f.kind for f in found.findings] == ["precision"]
    assert found.findings[0].operation == "dot_general"
    assert all(suggestion.cured for suggestion in found.suggestions)
