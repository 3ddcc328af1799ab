"""jamp.autocast as a transform and decorator: what it keeps of the function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import casts, dtypes, equations, matmul_dtypes, primitives, text, traced

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
LOW_PAIR = ("float16", "float16")

x44 = jnp.ones((4, 4))


def only(program, name):
    (eqn,) = [e for e in equations(program) if e.primitive.name == name]
    return eqn


def jits(program):
    return [e for e in equations(program) if e.primitive.name == "jit"]


@jax.jit
def helper(x, w):
    return jnp.tanh(x @ w)


def test_a_jit_keeps_its_name_and_stays_a_jit():
    eqn = only(traced(gpu(helper), x44, x44), "jit")
    assert eqn.params["name"] == "helper"
    assert matmul_dtypes(eqn.params["jaxpr"]) == [LOW_PAIR]


def test_a_jit_keeps_its_inlining_and_donation():
    inlined = jax.jit(lambda x, w: jnp.tanh(x @ w), inline=True)
    before, after = (primitives(traced(f, x44, x44)) for f in (inlined, gpu(inlined)))
    assert after["jit"] == before["jit"]  # some releases inline later, when lowering
    assert all(
        eqn.params["inline"] == before_eqn.params["inline"]
        for eqn, before_eqn in zip(
            jits(traced(gpu(inlined), x44, x44)),
            jits(traced(inlined, x44, x44)),
            strict=True,
        )
    )
    kept = jax.jit(lambda x, w: jnp.tanh(x @ w), keep_unused=True)
    assert only(traced(gpu(kept), x44, x44), "jit").params["keep_unused"] is True
    donating = jax.jit(lambda x, w: x @ w + x, donate_argnums=0)
    eqn = only(traced(gpu(donating), x44, x44 + 1), "jit")
    assert eqn.params["donated_invars"][:2] == (True, False)
    assert not any(eqn.params["donated_invars"][2:])
    assert len(eqn.params["donated_invars"]) == len(eqn.invars)


def test_a_jit_keeps_its_shardings():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("i"))
    whole = jax.NamedSharding(mesh, jax.P())
    fn = jax.jit(
        lambda x, w: jnp.tanh(x @ w), in_shardings=(rows, whole), out_shardings=rows
    )
    eqn = only(traced(gpu(fn), x44, x44 + 1), "jit")
    assert eqn.params["in_shardings"][:2] == (rows, whole)
    assert len(eqn.params["in_shardings"]) == len(eqn.invars)
    assert eqn.params["out_shardings"] == (rows,)
    assert gpu(fn)(x44, x44).sharding == rows


def test_a_jit_that_changes_nothing_is_left_as_it_is():
    fn = jax.jit(lambda n: n + 1)
    assert text(gpu(fn), jnp.arange(3)) == text(fn, jnp.arange(3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_output_dtype_casts_the_floating_results_and_no_others(dtype):
    fn = lambda x: {"y": x @ x, "n": jnp.argmax(x), "s": "text", "t": 1.5}  # noqa: E731
    result = gpu(fn, output_dtype=dtype)(x44)
    assert result["y"].dtype == dtype
    assert result["n"].dtype == jnp.int32
    assert (result["s"], result["t"]) == ("text", 1.5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("enabled", [True, False])
def test_output_dtype_holds_under_an_outer_autocast(dtype, enabled):
    inner = jamp.autocast(lambda x: x @ x44, output_dtype=dtype, enabled=enabled)
    outer = jamp.autocast(lambda x: inner(x @ x44))
    assert outer(x44).dtype == dtype
    assert (
        jax.grad(lambda x: outer(x).astype(jnp.float32).sum())(x44).dtype == jnp.float32
    )


def test_output_dtype_may_be_float64_under_an_outer_autocast():
    with jax.enable_x64(True):
        inner = jamp.autocast(lambda x: x * 3, output_dtype=jnp.float64)
        assert jamp.autocast(inner)(jnp.ones(3, jnp.float64)).dtype == jnp.float64


def test_results_keep_the_dtype_they_were_computed_in():
    fn = gpu(lambda x: (x @ x, jnp.exp(x @ x), x, x > 0))
    assert list(dtypes(fn(x44))) == ["float16", "float32", "float32", "bool"]


def test_leaves_that_are_not_arrays_reach_the_function_as_they_are():
    seen = []

    def fn(x, mode, n, *, activation=None, flags=(), options=None):
        seen.append((mode, n, activation, flags, options))
        if mode == "twice" and n > 1:
            x = x @ x
        return (x if activation is None else activation(x)) * len(flags)

    options = {"depth": 3, "name": "a"}
    result = gpu(fn)(
        x44, "twice", 2, activation=jnp.tanh, flags=(True, None), options=options
    )
    assert seen == [("twice", 2, jnp.tanh, (True, None), options)]
    assert result.dtype == jnp.float16
    assert gpu(fn)(x44, "once", 2, flags=(1,)).dtype == jnp.float32


def test_results_that_are_not_arrays_come_back_as_they_are():
    marker = object()
    result = gpu(lambda x: {"y": x @ x, "m": marker, "n": None, "s": ["a", 2]})(x44)
    assert result["m"] is marker
    assert (result["n"], result["s"]) == (None, ["a", 2])
    assert result["y"].dtype == jnp.float16


CLOSED_OVER = np.arange(3, dtype=np.float32)
CONSTANTS = {
    "array": lambda: jnp.array([1.0, 2.0]),
    "closed over": lambda: jnp.asarray(CLOSED_OVER),
    "numpy": lambda: np.ones(2, np.float32),
    "number": lambda: jnp.float32(2),
    "weakly typed": lambda: jnp.asarray(0.0),
    "integer": lambda: jnp.asarray(3),
    "complex": lambda: jnp.asarray(1 + 2j),
}


@pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS)
def test_results_that_depend_on_no_argument_are_arrays(make):
    def fn(x):
        return x @ x, make()

    def scaled(x):
        return gpu(fn)(x)[1].astype(jnp.complex64).at[...].add(1)

    under_autocast, expected = gpu(fn), jax.jit(fn)(x44)[1]
    for call in range(2):
        constant = under_autocast(x44)[1]
        assert isinstance(constant, jax.Array), call
        assert jax.typeof(constant) == jax.typeof(expected)
        np.testing.assert_array_equal(constant, expected)
        constant += 1  # what is kept for other calls stays as it is
    np.testing.assert_array_equal(jax.jit(scaled)(x44), expected + 1)


def test_numpy_arguments_are_arrays():
    result = gpu(lambda x, s: (x @ x) * s)(np.ones((2, 2), np.float32), np.float32(2))
    assert isinstance(result, jax.Array)
    assert result.dtype == jnp.float16


def test_true_and_one_are_different_static_arguments():
    fn = gpu(lambda x, flag: x @ x if flag is True else x)
    assert fn(x44, 1).dtype == jnp.float32
    assert fn(x44, True).dtype == jnp.float16
    assert fn(x44, 1.0).dtype == jnp.float32


def test_an_unhashable_leaf_is_passed_through():
    class Box:
        __hash__ = None

        def __init__(self, value):
            self.value = value

    fn = gpu(lambda x, box: (x @ x) * box.value)
    assert fn(x44, Box(2))[0, 0] == 8
    assert fn(x44, Box(3))[0, 0] == 12


def test_a_function_without_array_arguments_runs():
    w = jnp.ones((2, 2))
    result = gpu(lambda: jnp.ones((2, 2)) @ w)()
    assert result.dtype == jnp.float16


def test_arrays_that_a_function_closes_over_may_change_between_calls():
    box = {"w": jnp.eye(4)}
    fn = gpu(lambda x: x @ box["w"])
    assert fn(x44)[0, 0] == 1
    box["w"] = box["w"] * 5
    assert fn(x44)[0, 0] == 5


def test_attributes_of_a_decorated_methods_object_may_change_between_calls():
    class Layer:
        def __init__(self, w):
            self.w = w

        @jamp.autocast(device_type="gpu")
        def __call__(self, x):
            return x @ self.w

    layer, other = Layer(jnp.eye(4)), Layer(2 * jnp.eye(4))
    assert (layer(x44)[0, 0], other(x44)[0, 0]) == (1, 2)
    layer.w = layer.w * 5
    assert (layer(x44)[0, 0], other(x44)[0, 0]) == (5, 2)


@pytest.mark.parametrize("how", ["function", "closure", "argument"])
def test_parameters_of_an_nnx_module_may_change_between_calls(how):
    layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    fn = {
        "function": lambda: gpu(layer),
        "closure": lambda: gpu(lambda x: layer(x)),
        "argument": lambda: functools.partial(gpu(lambda m, x: m(x)), layer),
    }[how]()
    first = fn(x44)
    layer.kernel[...] = layer.kernel[...] * 2
    np.testing.assert_allclose(fn(x44), 2 * first, rtol=1e-2)


@pytest.mark.parametrize("how", ["function", "closure", "argument"])
def test_an_nnx_module_keeps_its_running_statistics(how):
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    x = jnp.arange(8.0).reshape(2, 4)
    {
        "function": lambda: gpu(norm)(x),
        "closure": lambda: gpu(lambda x: norm(x))(x),
        "argument": lambda: gpu(lambda m, x: m(x))(norm, x),
    }[how]()
    assert norm.mean[...].dtype == jnp.float32
    np.testing.assert_allclose(norm.mean[...], 0.01 * x.mean(0), rtol=1e-3)


def softmax(x):
    return x * 2


@jax.jit
def sign(x):
    return x + 100


def test_a_users_function_of_a_librarys_name_is_its_own():
    fn = gpu(lambda x: (softmax(x @ x), sign(x @ x)))
    results = fn(x44)
    assert list(dtypes(results)) == ["float16", "float16"]
    assert (results[0][0, 0], results[1][0, 0]) == (8, 104)
    report = jamp.explain(lambda x: softmax(x @ x), device_type="gpu")(x44)
    assert all(record.ruling.function is None for record in report.records)


def test_a_librarys_function_is_known_under_any_name():
    renamed = jax.nn.softmax
    assert gpu(lambda x: renamed(x @ x))(x44).dtype == jnp.float32


@jax.custom_jvp
def wrong(x):
    return x @ x


@wrong.defjvp
def _wrong_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return wrong(x), 7 * t + 0 * (x @ t)


def test_the_derivative_rule_of_the_user_is_kept_and_runs_under_the_policy():
    fn = gpu(wrong)
    total = lambda x: jnp.sum(fn(x).astype(jnp.float32))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(total)(x44), 7 * x44)
    program = traced(lambda x: jax.jvp(fn, (x,), (x,)), x44)
    assert matmul_dtypes(program) == [LOW_PAIR] * 2


def test_a_custom_jvp_stays_one():
    program = traced(gpu(wrong), x44)
    assert "name=wrong" in str(only(program, "custom_jvp_call"))
    assert primitives(traced(gpu(jax.nn.relu), x44))["custom_jvp_call"] == 1


@jax.custom_jvp
def with_static(n, x):
    return x**n


@with_static.defjvp
def _with_static_jvp(primals, tangents):
    (n, x), (_, t) = primals, tangents
    return with_static(n, x), 5 * t


def test_a_derivative_rule_with_an_integer_argument_is_kept():
    fn = gpu(lambda x: with_static(jnp.int32(2), x @ x))
    gradient = jax.grad(lambda x: fn(x).astype(jnp.float32).sum())(x44)
    np.testing.assert_allclose(gradient, 5 * 8 * x44, rtol=1e-2)


def test_a_decorated_function_keeps_name_module_and_documentation():
    @jamp.autocast
    def documented(x):
        """What it does."""
        return x

    assert documented.__name__ == "documented"
    assert documented.__module__ == __name__
    assert documented.__doc__ == "What it does."


def test_the_decorator_works_with_and_without_arguments_and_on_methods():
    @jamp.autocast
    def bare(x):
        return x @ x

    @jamp.autocast(dtype=jnp.float16)
    def chosen(x):
        return x @ x

    class Model:
        def __init__(self, w):
            self.w = w

        @jamp.autocast(device_type="gpu")
        def __call__(self, x):
            return x @ self.w

    assert bare(x44).dtype in (jnp.bfloat16, jnp.float16)
    assert chosen(x44).dtype == jnp.float16
    assert Model(x44)(x44).dtype == jnp.float16


def test_one_decorator_serves_several_functions():
    autocast = jamp.autocast(device_type="gpu")
    first, second = autocast(lambda x: x @ x), autocast(lambda x: jnp.exp(x @ x))
    assert (first(x44).dtype, second(x44).dtype) == (jnp.float16, jnp.float32)


@pytest.mark.parametrize("loop", ["scan", "while", "fori", "cond", "custom_vjp"])
def test_structural_operations_run_and_stay_what_they_are(loop):
    twice = jax.custom_vjp(lambda x: 2 * x)
    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    fn, name = {
        "scan": (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, length=3), "scan"),
        "while": (
            lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 5, lambda c: c * 2, x),
            "while",
        ),
        "fori": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i, x), "scan"),
        "cond": (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x * 2, lambda x: -x, x),
            "cond",
        ),
        "custom_vjp": (twice, "custom_vjp_call"),
    }[loop]
    both = lambda x: fn(x @ x)  # noqa: E731
    program = traced(gpu(both), x44)
    assert primitives(program)[name] == 1
    actual, expected = gpu(both)(x44), both(x44)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    records = jamp.explain(both, device_type="gpu")(x44).records
    assert name in {record.primitive for record in records}


def test_casts_of_the_arguments_stand_outside_a_jitted_helper():
    program = traced(gpu(helper), x44, x44 + 1)
    assert casts(only(program, "jit").params["jaxpr"]) == []
    assert len(casts(program)) == 2
