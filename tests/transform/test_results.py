"""What a function under autocast may return, and which of its errors come through."""

import enum
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_transforms import near

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")

X = jax.random.normal(jax.random.key(0), (4, 4))


class Mode(enum.Enum):
    EVAL = 2


class Mine(ValueError):
    pass


OWN_ERRORS = {
    "plain": lambda x: refuse(x),
    "in_jit": lambda x: jax.jit(refuse)(x),
    "in_a_loop": lambda x: jax.lax.map(refuse, x),
    "in_a_gradient": lambda x: jax.grad(lambda x: refuse(x).sum())(x),
    "from_one_of_jax": lambda x: from_jax(x),
}


def refuse(x):
    raise Mine("of the user")


def from_jax(x):
    try:
        return x @ jnp.ones(3)
    except TypeError as error:
        raise Mine("of the user") from error


@pytest.mark.parametrize("where", OWN_ERRORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_functions_own_error_is_raised_and_the_function_ran_once(where, dtype):
    runs = []

    def fn(x):
        runs.append(x.dtype)
        return OWN_ERRORS[where](x)

    with pytest.raises(Mine, match="of the user"):
        gpu(fn)(X.astype(dtype))
    assert runs == [dtype]


def widening_loop(x):
    widen = lambda c: c.astype(jnp.float32) * 2  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0, 0] < 9, widen, x)


@pytest.mark.parametrize("fn", [widening_loop, jnp.linalg.cholesky])
def test_what_jax_refuses_in_16_bits_runs_as_if_it_came_in_float32(fn):
    x = jnp.eye(4, dtype=jnp.bfloat16)
    with pytest.raises((TypeError, NotImplementedError)):
        jax.jit(fn)(x)
    near(gpu(fn)(x), fn(jnp.eye(4)))


def test_an_error_of_jax_is_about_the_dtypes_that_were_given():
    with pytest.raises(TypeError, match=r"bfloat16\[4,4\]") as plain:
        jax.make_jaxpr(in_shape)(X.astype(jnp.bfloat16))
    with pytest.raises(TypeError) as error:
        gpu(in_shape)(X.astype(jnp.bfloat16))
    assert str(error.value) == str(plain.value)


def in_shape(x):
    return jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c[0], x)


class Box:
    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        yield x


@dataclass(frozen=True)
class Config:
    size: int


@dataclass(frozen=True)
class Frozen:
    value: Any


MADE = {
    "an object": (lambda x: Box(x @ x), "Box"),
    "a frozen dataclass": (lambda x: Frozen(x @ x), "Frozen"),
    "a lambda": (lambda x: lambda: x, "function"),
    "a default of a lambda": (lambda x: lambda y=x: y, "function"),
    "a generator": (lambda x: (row for row in x), "generator"),
    "an iterator": (lambda x: map(jnp.sin, [x]), "map"),
    "a method": (lambda x: x.sum, "method"),
    "a partial": (lambda x: functools.partial(jnp.add, x), "partial"),
    "a jitted function": (lambda x: jax.jit(lambda: x), "PjitFunction"),
    "a set": (lambda x: set(x.shape), "set"),
    "an array of objects": (lambda x: np.array([{x.shape}]), "ndarray"),
    "a shape": (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "ShapeDtypeStruct"),
}


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", MADE)
def test_a_result_that_the_function_made_and_that_is_no_array_is_refused(kind, wrap):
    fn, name = MADE[kind]
    message = rf"returned a {name} at result\[1\]\['a'\], .*register its class as a pyt"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        wrap(gpu(lambda x: (x, {"a": fn(x)})))(X)


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("closed_over", [True, False])
def test_a_reference_is_written_to_at_every_call(closed_over, jit):
    def step(count, x):
        count[...] += 1
        return jnp.tanh(x @ x)

    count, x = jax.new_ref(jnp.zeros(())), jnp.ones((2, 2))
    if closed_over:
        fn = jit(jamp.autocast(lambda x: step(count, x), device_type="gpu"))
        results = [fn(x) for _ in range(3)]
    else:
        fn = jit(jamp.autocast(step, device_type="gpu"))
        results = [fn(count, x) for _ in range(3)]
    assert count[...] == 3
    assert {result.dtype.name for result in results} == {"float16"}


def test_a_reference_made_inside_is_no_result():
    with pytest.raises(jamp.AutocastTypeError, match=r"return .* jax.freeze\(ref\)"):
        jamp.autocast(lambda x: jax.new_ref(x @ x))(jnp.ones((2, 2)))


def test_a_token_is_refused_by_its_name():
    with pytest.raises(jamp.AutocastTypeError, match=r"AbstractToken.*return arrays"):
        jamp.autocast(lambda x: (x @ x, jax.lax.create_token()))(jnp.ones((2, 2)))


def test_a_module_of_nnx_beside_it_does_not_change_where_a_result_is_refused():
    fn = lambda model, x: (x, Box(model(x)))  # noqa: E731
    with pytest.raises(jamp.AutocastTypeError, match=r"a Box at result\[1\],"):
        gpu(fn)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), X)


CONSTANTS = {
    "text": "text",
    "number": 1.5,
    "enum": Mode.EVAL,
    "dtype": np.dtype("float32"),
    "scalar type": jnp.float32,
    "slice": slice(0, 3),
    "range": range(3),
    "frozenset": frozenset("ab"),
    "words": np.array(["a", "b"]),
    "date": np.datetime64("2020-01-01"),
    "records": np.array([(1, 2)], "i4,i4"),
    "config": Config(3),
    "function of a module": refuse,
    "jitted function of a module": jnp.tanh,
    "function with a gradient rule": jax.nn.relu,
    "partial of constants": functools.partial(jax.nn.gelu, approximate=False),
    "shape": (2, 2),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_is_returned_as_it_is(kind):
    fn = gpu(lambda x: (x @ x, CONSTANTS[kind]))
    for _ in range(2):
        result, constant = fn(X)
        assert (result.dtype, constant) == (jnp.float16, CONSTANTS[kind]) or (
            constant is CONSTANTS[kind]
        )


@dataclass(unsafe_hash=True)
class Changeable:
    size: int


def test_what_the_function_made_is_made_at_each_eager_call():
    fn = gpu(lambda x: (x @ x, np.array(["a", "b"]), Changeable(3)))
    _, words, changeable = fn(X)
    words[0], changeable.size = "c", 4
    _, words, changeable = fn(X)
    assert (words.tolist(), changeable.size) == (["a", "b"], 3)


GIVEN = {
    "object": Box(3),
    "function": lambda: 4,
    "set": {1, 2},
    "date": np.datetime64("2020-01-01"),
    "duration": np.timedelta64(1, "s"),
    "number of 16 bytes": np.longdouble(2),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "records": np.array([(1, 2)], "i4,i4"),
    "record": np.array([(1, 2)], "i4,i4")[0],
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_what_was_given_as_an_argument_may_be_returned(given):
    fn = gpu(lambda x, given: (x @ x, [given]))
    for _ in range(2):
        assert fn(X, given)[1][0] is given


def generator(x):
    yield x


async def coroutine(x):
    return x


async def asynchronous(x):
    yield x


RUN_LATER = {
    "generator": generator,
    "partial": functools.partial(generator),
    "object": Box(3),
    "method": Box(3).__call__,
    "async function": coroutine,
    "async generator": asynchronous,
}


@pytest.mark.parametrize("kind", RUN_LATER)
@pytest.mark.parametrize(
    "wrap", [jamp.autocast, jamp.custom_fwd, jamp.custom_bwd, jamp.explain]
)
def test_a_function_whose_body_runs_after_its_call_is_refused(kind, wrap):
    message = f"{wrap.__name__} takes a function, got an? .*, whose body runs after"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        wrap(RUN_LATER[kind])
