"""Between a product and a reader in float32 nothing rounds what it reads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax import lax
from jax.scipy import special
from unrounded import EYE, activations, assert_gradient_near, both, error_in_roundings

import jamp

ORDERS = {
    "top_k": lambda x: jax.lax.top_k(x, 3)[::-1],
    "argmax": lambda x: [jnp.argmax(x, -1)],
    "argmin": lambda x: [jax.jit(lambda x: jnp.argmin(x, -1))(x)],
    "argsort": lambda x: [jnp.argsort(x)],
    "sort": lambda x: jax.lax.sort([x, jax.lax.iota(int, x.size)], num_keys=1)[::-1],
}


@each_device
@pytest.mark.parametrize("name", ORDERS)
def test_which_is_the_largest_is_asked_before_the_rounding(name, device):
    x = activations(1, 0, LOW[device])[:1]

    def fn(x):
        close = jnp.sqrt(100 + x)  # many are equal when they are rounded
        return ORDERS[name](close[0])

    (places, *values), (expected, *_) = both(fn, device)(x)
    np.testing.assert_array_equal(places, expected)
    assert [value.dtype for value in values] == [LOW[device]] * len(values)


LEAPS = {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "floor_divide": lambda v: v // 2,
    "fmod": lambda v: jnp.fmod(v, 2),
    "remainder": lambda v: v % 2,
    "round": jnp.round,
}


@each_device
@pytest.mark.parametrize("name", LEAPS)
def test_where_a_result_leaps_is_asked_before_the_rounding(name, device):
    """Of three times 16 bits many numbers would be rounded to whole ones."""
    x = activations(20, 0, LOW[device])
    found, expected = both(lambda x: LEAPS[name](3 * x), device)(x)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))


@each_device
def test_which_is_larger_than_a_number_is_asked_before_the_rounding(device):
    eps = float(jnp.finfo(LOW[device]).eps)
    x = activations(0.01, 1, LOW[device])
    # Of x = 1 + eps, three times x is just below it, and rounded just above.
    compared = both(lambda x: 3 * x >= 3 + 3.2 * eps, device)(x)
    np.testing.assert_array_equal(*compared)


FUNCTIONS = {
    "arctan": jnp.arctan,
    "arctan2": lambda v: jnp.arctan2(v, 2.0),
    "cbrt": jnp.cbrt,
    "fmod": lambda v: jnp.fmod(v, 3.0),
    "helper with steps": jax.jit(
        lambda v: jnp.where(jnp.floor(v) % 2 == 0, 1, -1) * jnp.log(v)
    ),
    "poch": lambda v: special.poch(v, 2.0),
}


@each_device
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_takes_and_gives_is_not_rounded_for_float32(name, device):
    x = activations(0.25, 0, LOW[device])
    of_a_logarithm = lambda h: jnp.log(FUNCTIONS[name](h / 3 + 2.5))  # noqa: E731
    assert error_in_roundings(of_a_logarithm, x, device) <= 0.5


MOVES = {
    "at": lambda h: h.at[0].set(1.0),
    "concatenate": lambda h: jnp.concatenate([h, h]),
    "cummax": lambda h: jax.lax.cummax(h, axis=1),
    "dynamic_slice": lambda h: jax.lax.dynamic_slice_in_dim(h, 1, 2),
    "dynamic_update_slice": lambda h: jax.lax.dynamic_update_slice(h, h[:2], (2, 0)),
    "pad": lambda h: jnp.pad(h, 1, constant_values=1.0),
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sharding": lambda h: jax.lax.with_sharding_constraint(h, EYE.sharding),
    "split": lambda h: jnp.concatenate(jnp.split(h, 2)[::-1]),
    "stack": lambda h: jnp.stack([h, h]),
    "tile": lambda h: jnp.tile(h, 2),
    "unstack": lambda h: jnp.add(*jnp.unstack(h)[:2]) / 2,
}


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", MOVES)
def test_what_moves_a_value_before_its_reader_does_not_round_it(name, device):
    def of_about_one(h):
        return jnp.log(MOVES[name](1 + 2**-10 * jnp.tanh(h)))

    x = activations(1, 0, LOW[device])
    assert error_in_roundings(of_about_one, x, device) <= 0.5
    total = lambda fn: lambda x: fn(x).astype(jnp.float32).sum()  # noqa: E731
    gradient = both(of_about_one, device, lambda fn: jax.grad(total(fn)))
    eps = jnp.finfo(LOW[device]).eps
    assert_gradient_near(*gradient(x), 1, device, rtol=eps)


@jax.custom_vjp
def log_of_the_rest(p):
    return jnp.log(1 - p)


log_of_the_rest.defvjp(
    lambda p: (log_of_the_rest(p), 1 - p), lambda rest, ct: (-ct / rest,)
)


RULED = {
    "custom_vjp": log_of_the_rest,
    "entropy": lambda p: -special.xlogy(p, p) - special.xlog1py(1 - p, -p),
    "log_ndtr": lambda p: special.log_ndtr(20 * p - 10),
    "logaddexp": lambda p: jnp.logaddexp(4 * p, jnp.log(1 - p)),
    "logit": special.logit,
    "ndtri": special.ndtri,
    "zeta": lambda p: special.zeta(2.01 - p, 1.0),
}


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", RULED)
def test_a_function_with_a_derivative_rule_takes_what_was_not_rounded(name, device):
    """Near one 16 bits have but a few numbers, and one itself."""

    def of_nearly_one(h):
        return RULED[name](0.5 + 0.5 * jnp.tanh(h))

    x = activations(2, 0, LOW[device])
    assert error_in_roundings(of_nearly_one, x, device) <= 0.5
    own = jamp.autocast(lambda x: of_nearly_one(x @ EYE), device_type=device)
    gradient = jax.grad(lambda x: own(x).astype(jnp.float32).sum())(x)
    expected = jax.grad(lambda x: of_nearly_one(x).sum())(x)
    eps = jnp.finfo(LOW[device]).eps
    np.testing.assert_allclose(gradient, expected, rtol=eps, atol=eps)


ELEMENTS = {
    "cummax": lambda h: jax.lax.cummax(h, axis=1),
    "top_k": lambda h: jax.lax.top_k(h, 1)[0],
    "scan": lambda h: jax.lax.scan(
        lambda most, row: (jnp.maximum(most, row),) * 2, h[0], h
    )[1],
    "segment_max, transposed": lambda h: (
        jax.ops.segment_max(h.T, jnp.zeros(64, int), 1).T
    ),
    "cond": lambda h: jax.lax.cond(h[0, 0] < 9, lambda h: h, jnp.negative, h),
    "checkpoint": jax.checkpoint(lambda h: h * 1),
    "at": lambda h: jnp.zeros_like(h).at[jnp.arange(64)].set(h),
    "concatenate": lambda h: jnp.concatenate(jnp.split(h, 4, 1), 1),
}


@each_device
@pytest.mark.parametrize("name", ELEMENTS)
def test_nothing_exceeds_its_maximum_and_a_copy_is_the_same(name, device):
    """Of both the rounding is read, or of neither: or a logarithm of it is NaN."""

    def gap(x):
        h = jax.nn.gelu(x @ EYE)
        return ELEMENTS[name](h) - h

    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    assert np.asarray(jamp.autocast(gap, device_type=device)(x)).min() >= 0


@each_device
def test_what_is_repeated_may_have_been_cast_to_float32_before(device):
    def squares(x):
        offsets = jnp.ones((64, 64)).astype(jnp.float32)
        return jnp.square((x @ EYE)[None] - offsets[None])

    x = np.full((64, 64), 3, np.float32)
    np.testing.assert_array_equal(jamp.autocast(squares, device_type=device)(x), 4)


def of_a_branch(h):
    """The cotangents of a branch, which JAX hands what it had read once more."""

    def either(h):
        return lax.cond(jnp.cos(0.0) > 0, lambda _: h, jnp.ones_like, h)

    return jnp.tanh(jax.grad(lambda h: either(h).sum())(h))


def of_a_rule(h):
    """What a function with a derivative rule makes of the first of two operands."""
    doubled = jax.custom_jvp(lambda a, _: 2 * a)
    doubled.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
    return doubled(h, h)


@each_device
@pytest.mark.parametrize("hand_over", [of_a_branch, of_a_rule])
def test_what_is_handed_over_twice_may_be_read_once(hand_over, device):
    def fn(x):
        return hand_over(x @ jnp.ones((4, 4)) / 4).sum()

    low = jamp.autocast(fn, device_type=device)
    x = jnp.full((4, 4), 0.5)
    actual, expected = (jax.value_and_grad(f)(x) for f in (low, fn))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2**-7), actual, expected)
