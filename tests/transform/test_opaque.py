"""What autocast does not look into runs as traced; so do dtypes that it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs._construct import normal, square
from flax import linen as nn
from jax import export, lax
from jax.experimental import io_callback, sparse
from jaxprs import dtypes, matmul_dtypes, operand_dtypes, traced
from test_construct_matrix import LOW, TOLERANCE, cast, each_device, error

X, W = square()
SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def with_debug_callback(x, record):
    jax.debug.callback(record, x @ x)
    return x @ x


def with_pure_callback(x, record):
    return jax.pure_callback(record, SHAPE, x @ x)


def with_io_callback(x, record):
    return io_callback(record, SHAPE, x @ x, ordered=True)


CALLBACKS = {
    "debug": with_debug_callback,
    "pure": with_pure_callback,
    "io": with_io_callback,
}


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_is_called_once_and_gets_the_dtype_it_was_written_for(name, outside):
    seen = []

    def record(a):
        seen.append(a.dtype)
        return np.asarray(a)

    fn = outside(cast(lambda x: CALLBACKS[name](x, record), "gpu"))
    for calls in (1, 2):
        fn(X)
        jax.effects_barrier()
        assert seen == [np.dtype(np.float32)] * calls


def test_python_code_runs_once_for_each_trace():
    seen = []

    def fn(x):
        seen.append(x.shape)
        jax.debug.print("corner {corner}", corner=x[0, 0])
        return x @ x

    rewritten = cast(fn, "gpu")
    for x in (X, X + 1, X[:2, :2], X):
        rewritten(x)
    assert seen == [(4, 4), (2, 2)]


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_what_is_printed_is_printed_once(capsys, outside):
    def fn(x):
        jax.debug.print("corner {corner}", corner=(x @ x)[0, 0])
        return lax.scan(lambda c, _: (c @ x, jax.debug.print("step")), x, length=3)[0]

    outside(cast(fn, "gpu"))(X)
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    words = sorted(line.split()[0] for line in lines)
    assert words == ["corner", "step", "step", "step"]


def test_callbacks_in_order_stay_in_order():
    seen = []

    def fn(x):
        for place in range(3):
            io_callback(lambda a, at=place: seen.append(at), None, x @ x, ordered=True)
        return x @ x

    jax.jit(cast(fn, "gpu"))(X)
    jax.effects_barrier()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("platforms", [None, ("cpu", "cuda", "tpu")])
def test_a_program_of_symbolic_shapes_is_exported(platforms):
    fn = jax.jit(cast(lambda x: jnp.tanh(x @ x.T).sum(0) @ x, "gpu"))
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 4"), jnp.float32)
    exported = export.export(fn, platforms=platforms)(rows)
    assert exported.out_avals[0].dtype == jnp.float16
    for x in (X, X[:2], normal(7, 4)):
        expected = jnp.tanh(x @ x.T).sum(0) @ x
        assert error(exported.call(x), expected) < TOLERANCE["gpu"]


def test_an_exported_program_runs_as_it_was_exported():
    exported = export.export(jax.jit(lambda x: x @ x))(SHAPE)
    program = traced(cast(lambda x: exported.call(x @ x) @ x, "gpu"), X)
    assert operand_dtypes(program, "call_exported") == [("float32",)]
    assert matmul_dtypes(program) == [("float16", "float16")] * 2


@each_device
def test_a_sparse_matmul_runs_beside_dense_ones(device):
    matrix = sparse.BCOO.fromdense(jnp.where(normal(4, 4, seed=2) > 0, 1.0, 0.0))
    fn = lambda matrix, x, w: matrix @ (x @ w) + (x @ w).T @ matrix  # noqa: E731
    arguments = matrix, X, W
    low = (LOW[device],) * 2
    assert matmul_dtypes(traced(cast(fn, device), *arguments)).count(low) == 2
    assert error(cast(fn, device)(*arguments), fn(*arguments)) < TOLERANCE[device]


def test_the_same_random_bits_are_drawn():
    def fn(key, x):
        first, second = jax.random.split(key)
        chances = jnp.round(jnp.abs(x @ x))  # 0, 1 or more, in any dtype
        return jax.random.bits(first, (4,)), jax.random.bernoulli(second, chances)

    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        actual, expected = cast(fn, "gpu")(key, X), fn(key, X)
        assert error(actual, expected) == 0


UNTOUCHED = {
    "complex": (jnp.complex64, jnp.complex64, ("complex64", "complex64")),
    "int8": (jnp.int8, jnp.int8, ("int8", "int8")),
    "int32": (jnp.int32, jnp.int32, ("int32", "int32")),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_matmul_without_floats_runs_as_traced(name):
    x_dtype, w_dtype, expected = UNTOUCHED[name]
    x, w = (8 * X).astype(x_dtype), (8 * W).astype(w_dtype)
    fn = lambda x, w: x @ w  # noqa: E731
    assert matmul_dtypes(traced(cast(fn, "gpu"), x, w)) == [expected]
    np.testing.assert_array_equal(cast(fn, "gpu")(x, w), fn(x, w))


def test_an_integer_matmul_keeps_its_accumulator():
    x, w = jnp.full((4, 4), 100, jnp.int8), jnp.full((4, 4), 100, jnp.int8)
    fn = lambda x, w: lax.dot(x, w, preferred_element_type=jnp.int32)  # noqa: E731
    result = cast(fn, "gpu")(x, w)
    assert result.dtype == jnp.int32
    assert (result == 40_000).all()


# What comes in beside a float32 weight, or beside the other dtype.
PAIRS = {
    "bfloat16_and_float32": (jnp.bfloat16, jnp.float32),
    "float16_and_float32": (jnp.float16, jnp.float32),
    "float16_and_bfloat16": (jnp.float16, jnp.bfloat16),
    "float16_and_float16": (jnp.float16, jnp.float16),
    "bfloat16_and_bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float8_and_float8": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
}


@each_device
@pytest.mark.parametrize("name", PAIRS)
def test_a_matmul_of_narrow_arguments_runs_in_the_dtype_in_force(name, device):
    x, w = (a.astype(d) for a, d in zip((X, W), PAIRS[name], strict=True))
    fn = cast(lambda x, w: x @ w, device)
    assert matmul_dtypes(traced(fn, x, w)) == [(LOW[device],) * 2]
    expected = x.astype(jnp.float32) @ w.astype(jnp.float32)
    assert fn(x, w).dtype == LOW[device]
    assert error(fn(x, w), expected) < TOLERANCE[device]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_wider_result_asked_for_is_kept(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    fn = lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32)  # noqa: E731
    assert matmul_dtypes(traced(cast(fn, "gpu"), x, w)) == [(x.dtype.name,) * 2]
    np.testing.assert_array_equal(cast(fn, "gpu")(x, w), fn(x, w))


@each_device
@pytest.mark.parametrize("dtype", [bool, jnp.int8])
def test_a_matmul_of_integers_and_floats_gives_the_dtype_in_force(dtype, device):
    x = (X > 0).astype(dtype)
    fn = cast(lambda x, w: x @ w, device)
    assert fn(x, W).dtype == LOW[device]
    assert error(fn(x, W), x.astype(jnp.float32) @ W) < TOLERANCE[device]


@each_device
def test_a_complex_matmul_beside_a_real_one(device):
    def fn(x, w):
        z = lax.complex(x @ w, x)
        return z @ z, z * jnp.conj(z)

    rewritten = cast(fn, device)
    assert matmul_dtypes(traced(rewritten, X, W)) == [
        (LOW[device],) * 2,
        ("complex64", "complex64"),
    ]
    assert dtypes(rewritten(X, W)) == ("complex64", "complex64")
    assert error(rewritten(X, W), fn(X, W)) < TOLERANCE[device]


LAYERS = {
    "linen.Dense": (nn.Dense(3), (4, 5)),
    "linen.DenseGeneral": (nn.DenseGeneral((2, 3), axis=(-2, -1)), (2, 4, 5)),
    "linen.Conv": (nn.Conv(3, (3,)), (2, 5, 4)),
    "linen.GRUCell": (nn.GRUCell(5), (4, 5)),
}


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
@pytest.mark.parametrize("name", LAYERS)
@each_device
def test_a_layer_of_what_is_never_cast_takes_its_float32_weights_whole(
    name, dtype, device
):
    module, shape = LAYERS[name]
    with jax.enable_x64(dtype == "float64"):
        x = normal(*shape)
        cell = [x] if name == "linen.GRUCell" else []
        weights = module.init(jax.random.key(0), *cell, x)
        x = x.astype(dtype) * (1 + 1j if dtype == "complex64" else 1)
        given = weights, *[x for _ in cell], x
        made, expected = (
            fn(*given) for fn in (cast(module.apply, device), module.apply)
        )
        for one, other in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
            assert one.dtype == other.dtype == dtype
            np.testing.assert_allclose(one, other, rtol=1e-6)


FLOAT64 = {
    "both": (lambda x, w: x @ w, ("float64", "float64")),
    "one": (lambda x, w: x @ w.astype(jnp.float32), ("float64", "float32")),
    "cast": (lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32), None),
}


@each_device
@pytest.mark.parametrize("name", FLOAT64)
def test_a_matmul_with_a_float64_operand_runs_as_traced(name, device):
    fn, expected = FLOAT64[name]
    with jax.enable_x64(True):
        x, w = X.astype(jnp.float64), W.astype(jnp.float64)
        program = traced(cast(fn, device), x, w)
        plain = traced(fn, x, w)
        (found,) = matmul_dtypes(program)
        assert found == (matmul_dtypes(plain)[0] if expected else (LOW[device],) * 2)
        assert "float64" in found or expected is None
        tolerance = 0.0 if expected else TOLERANCE[device]
        assert error(cast(fn, device)(x, w), fn(x, w)) <= tolerance


def test_float64_switched_on_around_the_call_is_another_signature():
    fn = cast(lambda x: (x @ x, jnp.arange(4) * 1.0), "gpu")
    assert dtypes(fn(np.eye(4))) == ("float16", "float32")
    with jax.enable_x64(True):
        assert dtypes(fn(np.eye(4))) == ("float64", "float64")
    assert dtypes(fn(np.eye(4))) == ("float16", "float32")


def test_numpy_scalars_and_python_scalars_widen_nothing():
    scalars = (2.0, 2, np.float32(2), np.float64(2), np.int32(2), jnp.float32(2))
    for scalar in scalars:
        for fn in (lambda x, s: (x @ x) * s, lambda x, s: s + x @ x):
            assert cast(fn, "gpu")(X, scalar).dtype == jnp.float16
