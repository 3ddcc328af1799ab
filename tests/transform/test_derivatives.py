"""Forward mode, second derivatives and transposition of what autocast returns."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from constructs._construct import square
from constructs.derivatives import doubled_gradient
from jax import lax
from jax.test_util import check_grads
from jaxprs import dtypes, matmul_dtypes, traced
from test_construct_matrix import (
    LOW,
    NAMED,
    TOLERANCE,
    cast,
    each_device,
    error,
    gradient,
    split,
    weighed,
)
from test_transforms import all_float32

import jamp

# JAX has no forward mode for custom_vjp functions.
FORWARD = (
    "scan",
    "scan_with_carries_of_all_kinds",
    "recurrent_network",
    "gradient_descent",
    "while_loop",
    "fori_loop_up_to_an_argument",
    "associative_scan",
    "cond_over_mixed_dtypes",
    "switch",
    "checkpoint_these_names",
    "checkpoint_around_scan",
    "jit_in_jit",
    "custom_jvp",
    "custom_jvp_with_symbolic_zeros",
    "custom_jvp_with_a_callable",
    "custom_root",
    "custom_linear_solve",
    "frexp_and_ldexp",
)
SECOND = (
    "scan",
    "checkpoint_these_names",
    "custom_jvp",
    "custom_linear_solve",
    "frexp_and_ldexp",
)
X, W = square()


def of_floats(name, wrap=lambda fn: fn):
    """A construct as a function of its floating arguments, and these."""
    construct = NAMED[name]
    floats, merged = split(construct.arguments())
    fn = wrap(construct.fn)
    return lambda floats: floating(fn(*merged(floats))), floats


def floating(result):
    return split(result)[0]


def assert_near(actual, expected, device, factor=1):
    assert error(actual, expected) < factor * TOLERANCE[device]


def reversed_rows(floats):
    """A direction that is not a derivative's fixed point: the arrays upside down."""
    return [leaf[::-1] if leaf.ndim else leaf for leaf in floats]


@functools.cache
def tangents(name):
    """Floating results of a construct and their tangents, each way: one program."""
    plain, floats = of_floats(name)
    low = {
        device: of_floats(name, functools.partial(cast, device=device))[0]
        for device in LOW
    }

    @jax.jit
    def run(floats, direction):
        ways = {"float32": plain, **low}
        found = {way: jax.jvp(fn, (floats,), (direction,)) for way, fn in ways.items()}
        values, linear = jax.linearize(low["gpu"], floats)
        return found | {"linearized": (values, linear(direction))}

    return run(floats, reversed_rows(floats))


@each_device
@pytest.mark.parametrize("name", FORWARD)
def test_jvp_gives_tangents_in_the_dtypes_of_the_results(name, device):
    values, actual = tangents(name)[device]
    assert dtypes(actual) == dtypes(values)
    assert_near(actual, tangents(name)["float32"][1], device, 2)


@pytest.mark.parametrize("name", FORWARD)
def test_linearize_gives_the_tangents_of_jvp(name):
    actual, expected = (tangents(name)[way][1] for way in ("linearized", "gpu"))
    assert dtypes(actual) == dtypes(expected)
    assert_near(actual, expected, "gpu")


@functools.cache
def second(name):
    """Second derivatives on each device and in float32: one program."""
    construct = NAMED[name]
    plain, floats = gradient(construct.fn, construct.arguments())
    ways = {"float32": jax.jacrev(plain)}
    for device in LOW:
        first, _ = gradient(cast(construct.fn, device), construct.arguments())
        ways[device] = jax.jacfwd(first)
    return jax.jit(lambda floats: {way: fn(floats) for way, fn in ways.items()})(floats)


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_near_those_in_float32(name, device):
    actual, expected = second(name)[device], second(name)["float32"]
    assert set(jax.tree.leaves(dtypes(actual))) == {"float32"}
    assert_near(actual, expected, device, 2)


@each_device
def test_a_custom_vjp_is_differentiated_twice_in_reverse_mode(device):
    def twice(fn):
        return jax.jacrev(jax.grad(lambda x: weighed(fn(x, W))))

    low = twice(cast(doubled_gradient, device))
    actual, expected = jax.jit(lambda x: (low(x), twice(doubled_gradient)(x)))(X)
    assert_near(actual, expected, device, 2)


@each_device
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_jacobians_have_the_dtypes_of_results_and_arguments(mode, device):
    fn = functools.partial(NAMED["checkpoint_around_scan"].fn, w=W)
    ways = jax.jit(lambda x: (mode(cast(fn, device))(x), mode(fn)(x)))
    actual, plain = ways(X)
    value = jax.eval_shape(cast(fn, device), X)
    expected = dtypes(value) if mode is jax.jacfwd else ("float32", "float32")
    assert dtypes(actual) == expected
    assert_near(actual, plain, device, 2)


LINEAR = {
    "matmul": lambda x: x @ W,
    "jit": jax.jit(lambda x: (x @ W) @ W.T),
    "scan": lambda x: lax.scan(lambda c, _: (c @ W, c), x, length=2),
    "cond": lambda x: lax.cond(W[0, 0] > 0, lambda x: x @ W, lambda x: 2 * x, x),
    "convolution": lambda x: lax.conv(x[None, None], W[None, None], (1, 1), "SAME"),
}


@each_device
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_program_is_transposed_in_16_bits(name, device):
    def transposed(fn, dtype_of):
        shapes = jax.eval_shape(dtype_of, X)
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
        return jax.linear_transpose(fn, X)(ones)[0]

    fn = cast(LINEAR[name], device)
    program = traced(lambda: transposed(fn, fn))
    assert all("float32" not in pair for pair in matmul_dtypes(program))
    assert matmul_dtypes(program)
    actual = transposed(fn, fn)
    assert actual.dtype == jnp.float32
    assert_near(actual, transposed(LINEAR[name], LINEAR[name]), device)


@pytest.mark.numbers
# A program with a cast to 16 bits of its own has no differences worth comparing with.
@pytest.mark.parametrize(
    "name", [name for name in FORWARD if name != "cond_over_mixed_dtypes"]
)
def test_derivatives_agree_with_differences_under_an_all_float32_policy(name):
    policy = all_float32()
    fn, floats = of_floats(name, lambda fn: jamp.autocast(fn, policy=policy))
    modes = ["fwd"] if NAMED[name].no_gradient else ["fwd", "rev"]
    check_grads(jax.jit(fn), (floats,), 1, modes, atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("function", [jax.nn.mish, jax.nn.standardize, jax.nn.softmax])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_constant_tangent_leaves_a_value_its_dtype(function, device):
    def normed(scale, h):
        params = {"params": {"scale": scale, "bias": scale}}
        return function(nn.LayerNorm().apply(params, h))

    def with_tangent(scale, h):
        of_scale = functools.partial(normed, h=h)
        return jax.jvp(of_scale, (scale,), (jnp.zeros_like(scale),))[0]

    arguments = jnp.ones(8), jnp.ones((4, 8), jnp.bfloat16)
    found = (
        jax.eval_shape(jamp.autocast(fn, device_type=device), *arguments).dtype
        for fn in (normed, with_tangent)
    )
    assert len({*found}) == 1
