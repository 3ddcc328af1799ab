"""What goes into a function under autocast and comes out: trees, scalars, closures."""

import enum
import functools
import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import matmul_dtypes, traced
from test_transforms import near

import jamp

LOW_PAIR = ("float16", "float16")
gpu = functools.partial(jamp.autocast, device_type="gpu")

X = jax.random.normal(jax.random.key(0), (4, 4))
W = jax.random.normal(jax.random.key(1), (4, 4)) / 2


class Pair(NamedTuple):
    x: Any
    w: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "w"], meta_fields=["power"]
)
@dataclass
class Registered:
    x: Any
    w: Any
    power: int = 2


@jax.tree_util.register_dataclass
@dataclass
class Named:
    x: Any
    name: str

    def __post_init__(self):
        self.name = self.name.upper()


TREES = {
    "nested": ([{"x": X}, (None, [W, ()])], lambda t: t[0]["x"] @ t[1][1][0]),
    "ordered_dict": (OrderedDict(b=X, a=W), lambda t: t["b"] @ t["a"]),
    "deque": (deque([X, W]), lambda t: t[0] @ t[1]),
    "named_tuple": (Pair(X, W), lambda t: t.x @ t.w),
    "dataclass": (Registered(X, W), lambda t: (t.x @ t.w) * t.power),
    "dataclass with a text": (Named(X, "x"), lambda t: t.x @ t.x),
    "partial": (jax.tree_util.Partial(jnp.matmul, X), lambda t: t(W)),
}


@pytest.mark.parametrize("kind", TREES)
def test_any_tree_goes_in_and_comes_out(kind):
    tree, product = TREES[kind]
    result, returned = gpu(lambda tree: (product(tree), tree))(tree)
    assert result.dtype == jnp.float16
    near(result, product(tree))
    assert type(returned) is type(tree)
    assert jax.tree.structure(returned) == jax.tree.structure(tree)
    for out, into in zip(jax.tree.leaves(returned), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(out, into)


def test_an_array_that_is_only_passed_on_keeps_its_dtype():
    arrays = {
        "key": jax.random.key(0),
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "empty": jnp.ones((0, 4)),
        "numpy": np.ones(2, np.float32),
    }
    result, returned = gpu(lambda x, arrays: (x @ x, arrays))(X, arrays)
    assert result.dtype == jnp.float16
    for name, array in arrays.items():
        assert (returned[name].dtype, returned[name].shape) == (
            array.dtype,
            array.shape,
        )


def variadic(*arrays, scale, **named):
    product = functools.reduce(jnp.matmul, arrays)
    return product * scale + sum(named.values())


def test_variadic_and_keyword_only_arguments():
    arguments, named = (X, W, X), {"a": W, "b": X}
    expected = variadic(*arguments, scale=0.5, **named)
    near(gpu(variadic)(*arguments, scale=0.5, **named), expected)
    program = traced(gpu(variadic), *arguments, scale=0.5, **named)
    assert matmul_dtypes(program) == [LOW_PAIR] * 2
    with pytest.raises(TypeError, match="scale"):
        gpu(variadic)(X, W)


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


def steered(x, w, mode, *, deep=False, activation=jnp.tanh):
    x = activation(x @ w) if mode is Mode.TRAIN else x
    return x @ w if deep else x


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("deep", [False, True])
def test_arguments_that_are_no_arrays_steer_the_function(mode, deep):
    fn = gpu(steered)
    for activation in (jnp.tanh, jnp.sin):
        result = fn(X, W, mode, deep=deep, activation=activation)
        near(result, steered(X, W, mode, deep=deep, activation=activation))
    program = jax.make_jaxpr(lambda x, w: fn(x, w, mode, deep=deep))(X, W)
    assert len(matmul_dtypes(program)) == deep + (mode is Mode.TRAIN)


SCALARS = [2, 2.0, True, np.float32(2), np.float64(2), np.int32(2), jnp.float32(2)]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_a_scalar_argument_follows_the_array_beside_it(scalar, wrap):
    def fn(x, scalar):
        return (x @ x) * scalar, scalar + (x @ x)

    results = wrap(gpu(fn))(X, scalar)
    assert [result.dtype for result in results] == [jnp.float16] * 2
    for result, expected in zip(results, fn(X, scalar), strict=True):
        near(result, expected)


def test_a_python_number_is_what_it_is_at_each_call():
    fn = gpu(lambda x, s: x @ x * s)
    for scalar in (2.0, 3.0, 2, -1.5):
        near(fn(X, scalar), X @ X * scalar)
    sign = gpu(lambda x, s: jnp.copysign(x @ x, s))
    for zero in (0.0, -0.0):
        assert np.all(np.signbit(sign(X, zero)) == (math.copysign(1, zero) < 0))
    missing = gpu(lambda x, s: x @ x * s)(X, math.nan)
    assert np.all(np.isnan(missing))


ENCLOSING = {
    "jit": lambda fn: jax.jit(lambda w: fn(lambda: w)(X))(W),
    "grad": lambda fn: jax.grad(lambda w: total(fn(lambda: w)(X)))(W),
    "jvp": lambda fn: jax.jvp(lambda w: total(fn(lambda: w)(X)), (W,), (X,)),
    "vmap": lambda fn: jax.vmap(lambda w: fn(lambda: w)(X))(jnp.stack([W, X])),
    "scan": lambda fn: jax.lax.scan(lambda c, w: (c, fn(lambda: w)(X)), 0, X[None])[1],
    "scan_carry": lambda fn: jax.lax.scan(
        lambda c, _: (jnp.tanh(fn(lambda: c)(X)).astype(c.dtype), None),
        W,
        None,
        length=3,
    )[0],
    "cond": lambda fn: jax.lax.cond(
        W[0, 0] < 9, lambda w: fn(lambda: w)(X), lambda w: 0 * fn(lambda: w)(w), W
    ),
    "checkpoint": lambda fn: jax.grad(
        jax.checkpoint(lambda w: total(fn(lambda: jnp.sin(w))(X)))
    )(W),
    "grad_of_vmap_in_jit": lambda fn: jax.jit(
        jax.grad(lambda w: total(jax.vmap(lambda x: fn(lambda: w)(x[None]))(X)))
    )(W),
}


def total(x):
    return jnp.sum(x.astype(jnp.float32) * jnp.arange(x.size).reshape(x.shape))


@pytest.mark.parametrize("around", ENCLOSING)
def test_a_function_closes_over_a_tracer_of_what_is_around_it(around):
    run = ENCLOSING[around]

    def plain(weight):
        return lambda x: jnp.tanh(x @ weight())

    lowered = lambda weight: gpu(plain(weight))  # noqa: E731
    assert set(matmul_dtypes(traced(lambda: run(lowered)))) == {LOW_PAIR}
    actual, expected = jax.tree.leaves(run(lowered)), jax.tree.leaves(run(plain))
    for result, wanted in zip(actual, expected, strict=True):
        near(result, wanted)


def test_a_gradient_flows_to_what_is_closed_over_and_to_the_argument():
    def loss(w, x, wrap):
        return total(wrap(lambda x: jnp.tanh(x @ w) @ w)(x))

    actual, expected = (
        jax.grad(loss, (0, 1))(W, X, wrap) for wrap in (gpu, lambda fn: fn)
    )
    for gradient, wanted in zip(actual, expected, strict=True):
        assert gradient.dtype == jnp.float32
        near(gradient, wanted)


@pytest.mark.parametrize("constant", [np.asarray(W), W, W.tolist()], ids=type)
def test_a_function_closes_over_constants(constant):
    fn = lambda x: x @ jnp.asarray(constant)  # noqa: E731
    assert matmul_dtypes(traced(gpu(fn), X)) == [LOW_PAIR]
    near(gpu(fn)(X), fn(X))


def test_a_numpy_array_that_a_function_closes_over_is_a_constant_as_under_jit():
    box = {"w": np.eye(4, dtype=np.float32)}
    plain = lambda x: x @ box["w"]  # noqa: E731
    fn, jitted = gpu(plain), jax.jit(plain)
    near(fn(X), jitted(X))
    box["w"] = box["w"] * 5
    near(fn(X), jitted(X))


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_numpy_values_that_a_partial_holds_are_constants_as_under_jit(wrap):
    widths = {"before": np.array([1, 2]), "after": np.int64(3)}
    plain = functools.partial(
        lambda widths, x: jnp.pad(x @ x, (*widths["before"][:1], widths["after"])),
        widths,
    )
    fn = wrap(gpu(plain))
    for _ in range(2):
        near(fn(X), jax.jit(plain)(X))


def test_an_array_that_takes_the_place_of_one_in_a_partial_is_seen():
    box = {"w": np.eye(4, dtype=np.float32)}
    fn = gpu(functools.partial(lambda box, x: x @ box["w"], box))
    for factor in range(1, 5):
        box["w"] = factor * np.eye(4, dtype=np.float32)
        near(fn(X), factor * X)


def test_a_function_without_arrays_gives_what_it_gives():
    assert gpu(lambda: "text")() == "text"
    assert gpu(lambda n: n + 1)(2) == 3
    assert gpu(lambda: None)() is None
    assert gpu(lambda *a, **k: (a, k))(1, "b", c=None) == ((1, "b"), {"c": None})
    assert gpu(lambda x: x.shape)(X) == (4, 4)
    assert gpu(lambda x: str(x.dtype))(X) == "float32"


def test_a_function_may_return_a_function_or_one_array_twice():
    result, again, fn = gpu(lambda x: (y := x @ x, y, jnp.tanh))(X)
    assert fn is jnp.tanh
    np.testing.assert_array_equal(result, again)
    assert result.dtype == again.dtype == jnp.float16


def test_side_effects_of_python_happen_once_per_trace():
    seen = []

    def fn(x, mode="a"):
        seen.append((x.shape, mode))
        return x @ x

    fn_low = gpu(fn)
    for _ in range(3):
        fn_low(X)
    assert seen == [((4, 4), "a")]
    fn_low(X[:2, :2])
    fn_low(X, "b")
    fn_low(X, mode="b")  # another way to call it is another trace, as it is for jit
    fn_low(X[:2, :2])
    assert seen[1:] == [((2, 2), "a"), ((4, 4), "b"), ((4, 4), "b")]


def test_an_error_of_the_function_comes_through_at_every_call():
    attempts = itertools.count()

    def fn(x):
        if next(attempts) < 2:
            raise KeyError("not yet")
        return x @ x

    fn_low = gpu(fn)
    for _ in range(2):
        with pytest.raises(KeyError, match="not yet"):
            fn_low(X)
    near(fn_low(X), X @ X)


class Branching:
    def __call__(self, x):
        return x if x.sum() > 0 else -x

    def method(self, x):
        return self(x)


class BranchingModule(nnx.Module):
    def __call__(self, x):
        return x if x.sum() > 0 else -x


def branching(x):
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (branching, branching),
        (functools.partial(branching), branching),
        (Branching(), Branching.__call__),
        (Branching().method, Branching.method),
        (BranchingModule(), BranchingModule.__call__),
    ],
    ids=["function", "partial", "object", "method", "module"],
)
def test_an_error_of_jax_while_tracing_names_the_users_function(fn, code):
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        gpu(fn)(X)
    line = code.__code__.co_firstlineno
    assert f"function {code.__name__} at {__file__}:{line} " in str(error.value)


class Layer:
    """Something callable, with methods of every kind."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x @ self.w

    def method(self, x):
        return self(x)

    @classmethod
    def of_class(cls, x):
        return cls(W)(x)

    @staticmethod
    def static(x, w=W):
        return x @ w


CALLABLES = {
    "lambda": lambda x: x @ W,
    "object": Layer(W),
    "method": Layer(W).method,
    "classmethod": Layer.of_class,
    "staticmethod": Layer.static,
    "partial": functools.partial(jnp.matmul, b=W),
    "partial_of_partial": functools.partial(functools.partial(Layer.static), w=W),
    "tree_partial": jax.tree_util.Partial(jnp.matmul, b=W),
    "jitted": jax.jit(lambda x: x @ W),
    "jitted_method": jax.jit(Layer(W).method),
    "checkpointed": jax.checkpoint(lambda x: x @ W),
    "vmapped": jax.vmap(Layer(W)),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_whatever_is_callable_can_be_transformed(kind):
    fn = CALLABLES[kind]
    assert matmul_dtypes(traced(gpu(fn), X)) == [LOW_PAIR]
    near(gpu(fn)(X), X @ W)


def test_jit_around_it_may_name_static_and_donated_arguments():
    def fn(x, w, mode):
        return x @ w if mode == "product" else x + w

    static = jax.jit(gpu(fn), static_argnames="mode")
    near(static(X, W, mode="product"), X @ W)
    near(static(X, W, mode="sum"), X + W)
    numbered = jax.jit(gpu(fn), static_argnums=2, donate_argnums=0)
    near(numbered(jnp.array(X), W, "product"), X @ W)


def test_a_shape_may_stand_for_an_array_where_nothing_is_computed():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    result = jax.eval_shape(gpu(lambda t: {"y": t["x"] @ t["x"]}), {"x": shape})
    assert (result["y"].shape, result["y"].dtype) == ((4, 4), jnp.float16)
    assert matmul_dtypes(jax.make_jaxpr(gpu(lambda x: x @ x))(shape)) == [LOW_PAIR]


def test_an_optimizer_is_told_what_goes_around_it():
    message = r"got an optimizer; .* jamp.dynamic_loss_scaling around the optimizer"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.autocast(optax.adam(1e-3), dtype=jnp.float16)
