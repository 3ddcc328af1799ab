"""Pools of the largest and the smallest, and their gradients: those of JAX, exactly."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax

import jamp

LOW = jnp.bfloat16
POLICY = jamp.Policy.load("cpu").with_rules(lower=["neg"])
LARGEST = (-np.inf, lax.max)
SMALLEST = (np.inf, lax.min)


def pool(x, window, strides, padding, largest=True, **dilations):
    start, choose = LARGEST if largest else SMALLEST
    start = np.asarray(start, x.dtype)
    return lax.reduce_window(x, start, choose, window, strides, padding, **dilations)


def cast(fn):
    """A function of what is in 16 bits, under autocast."""
    return jamp.autocast(lambda x: fn(lax.neg(lax.neg(x))), policy=POLICY, dtype=LOW)


def distinct(shape):
    """Different integers, all of which bfloat16 holds."""
    size = math.prod(shape)
    assert size <= 256
    return np.random.default_rng(0).permutation(size).reshape(shape).astype(np.float32)


def integers(shape, seed=0):
    """Small integers, many of which are equal."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def with_infinities(shape):
    drawn = np.random.default_rng(1)
    infinite = np.where(drawn.random(shape) < 0.5, np.inf, -np.inf)
    found = np.where(drawn.random(shape) < 0.2, infinite, integers(shape))
    return found.astype(np.float32)


def transforms(fn, shape):
    """What is asked of a pool: the gradients are small integers, with exact sums."""

    def gradient(x):
        result, pullback = jax.vjp(fn, x)
        weights = 1 + np.arange(result.size).reshape(result.shape) % 7
        return pullback(jnp.asarray(weights, result.dtype))[0]

    along = integers(shape, 1)
    return {
        "values": fn,
        "gradient": gradient,
        "tangent": lambda x: jax.jvp(fn, (x,), (along,))[1],
        "gradients of a batch": lambda x: jax.vmap(gradient)(jnp.stack([x, x[::-1]])),
        "gradient along a direction": lambda x: jax.jvp(gradient, (x,), (along,))[1],
        "checkpoint": lambda x: jax.vjp(jax.checkpoint(fn), x)[1](fn(x) * 0 + 1)[0],
    }


def check(shape, *windows, names=None, draw=distinct, **options):
    x = draw(shape)
    found, expected = (
        transforms(transform(lambda x: pool(x, *windows, **options)), shape)
        for transform in (cast, lambda fn: fn)
    )
    for name in names or found:
        actual, wanted = (jax.jit(each[name])(x) for each in (found, expected))
        np.testing.assert_array_equal(np.float32(actual), wanted, err_msg=name)


POOLS = {
    "apart": ((2, 4, 6, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "overlapping": ((1, 7, 9, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "next to each other": ((2, 5, 5, 1), (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "with gaps": ((9, 7), (2, 1), (4, 3), "VALID"),
    "larger than the array": ((3, 4), (5, 6), (2, 2), ((2, 3), (1, 4))),
    "of every dimension": ((4, 5, 6), (2, 3, 2), (1, 2, 3), "SAME"),
    "of one element": ((3, 4, 5), (1, 1, 1), (1, 1, 1), "VALID"),
    "of too many places": ((9, 20), (9, 9), (9, 1), "VALID"),
    "with room between": ((9, 9), (2, 2), (1, 1), "VALID"),
}


@pytest.mark.numbers
@pytest.mark.parametrize("largest", [True, False], ids=["max", "min"])
@pytest.mark.parametrize("name", POOLS)
def test_a_pool_and_its_derivatives_are_those_of_jax(name, largest):
    check(*POOLS[name], largest=largest)


@pytest.mark.parametrize("draw", [integers, with_infinities])
@pytest.mark.parametrize("name", POOLS)
def test_the_gradients_of_equal_numbers_go_where_those_of_jax_go(name, draw):
    check(*POOLS[name], names=["values", "gradient"], draw=draw)


def test_a_pool_may_leave_out_what_is_at_the_edges():
    def gradient(fn):
        return jax.jit(jax.grad(lambda x: jnp.sum(cast(fn)(x).astype(np.float32))))

    windows, x = ((2, 2), (2, 2)), integers((6, 9))
    cut = gradient(lambda x: pool(x, *windows, ((0, 0), (-1, -2))))(x)
    np.testing.assert_array_equal(
        cut, gradient(lambda x: pool(x[:, 1:-2], *windows, "VALID"))(x)
    )


@pytest.mark.parametrize("option", ["base_dilation", "window_dilation"])
def test_a_dilated_pool_has_the_values_and_tangents_of_jax(option):
    pooling = (2, 3), (1, 2), "VALID"
    check((6, 8), *pooling, names=["values", "tangent"], **{option: (2, 1)})


@st.composite
def pools(draw):
    shape, sizes, strides, padding = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        low, high = (draw(st.integers(0, size - 1)) for _ in range(2))
        shape.append(draw(st.integers(max(1, size - low - high), 6)))
        sizes.append(size)
        strides.append(draw(st.integers(1, 3)))
        padding.append((low, high))
    return tuple(shape), tuple(sizes), tuple(strides), tuple(padding)


def check_any(examples):
    names = ["gradient", "tangent"]
    run = given(pools(), st.booleans())(
        lambda pooling, largest: check(*pooling, largest=largest, names=names)
    )
    settings(max_examples=examples)(run)()


@pytest.mark.once
def test_any_pool_has_the_gradients_of_jax():
    check_any(15)


@pytest.mark.slow
def test_many_pools_have_the_gradients_of_jax():
    check_any(150)


def gradients_text(transform, size=2, **options):
    x = jax.ShapeDtypeStruct((8, 8, 64, 2), np.float32, **options)
    window = (1, size, size, 1)
    fn = transform(lambda x: pool(x, window, window, "VALID"))
    return jax.jit(jax.grad(lambda x: jnp.sum(fn(x).astype(np.float32)))).lower(x)


def test_the_gradient_on_one_cpu_is_no_scatter():
    assert "select_and_scatter" in gradients_text(lambda fn: fn).as_text()
    assert "select_and_scatter" not in gradients_text(cast).as_text()
    assert "select_and_scatter" in gradients_text(cast, size=8 + 1).as_text()


def test_the_gradient_on_several_devices_is_that_of_jax():
    mesh = jax.make_mesh((2,), ("d",))
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    assert "select_and_scatter" in gradients_text(cast, sharding=sharding).as_text()


def test_a_pool_of_any_size_can_be_exported():
    window = (1, 2, 2)
    fn = cast(lambda x: pool(x, window, window, "VALID"))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(fn(x).astype(np.float32))))
    shape = export.symbolic_shape("b, h, 6")
    exported = export.export(gradient)(jax.ShapeDtypeStruct(shape, np.float32))
    x = distinct((3, 8, 6))
    np.testing.assert_array_equal(exported.call(x), gradient(x))


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (4, 0)])
def test_a_pool_of_nothing_has_the_derivatives_of_jax(shape):
    check(shape, (2, 1), (2, 1), "VALID", names=["values", "gradient", "tangent"])


def test_what_is_pooled_in_float32_is_as_written():
    def text(fn):
        x = jnp.ones((8, 8))
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(fn(x))))(x))

    fn = lambda x: pool(x, (2, 2), (2, 2), "VALID")  # noqa: E731
    assert text(jamp.autocast(fn, dtype=LOW, device_type="cpu")) == text(fn)
