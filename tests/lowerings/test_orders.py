"""Comparisons of bfloat16: JAX's results and gradients, and none in 16 bits on CPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import operand_dtypes
from tables import check_each

import jamp

LOW = jnp.bfloat16
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1.0, 3e38, -3e38, 1e-40]
X = np.concatenate([SPECIAL, np.random.default_rng(0).normal(size=54)])
X = np.asarray(X.reshape(8, 8), LOW).astype(np.float32)
FINITE = np.where(np.isfinite(X), X, 2.0).clip(-4, 4)

PAIRS = (lax.eq, lax.ge, lax.gt, lax.le, lax.lt, lax.max, lax.min, lax.ne)
OPERATIONS = {
    **{
        compare.__name__: lambda x, compare=compare: compare(x, x[:, ::-1])
        for compare in PAIRS
    },
    "argmax": lambda x: lax.argmax(x, 1, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "clamp": lambda x: lax.clamp(np.array(-1, x.dtype), x, np.array(0.5, x.dtype)),
    "max of a number": lambda x: jnp.maximum(x, 0),
    "sign": lax.sign,
    "top_k": lambda x: lax.top_k(x, 3),
}
DIFFERENTIABLE = ["max", "min", "clamp", "max of a number", "sign", "top_k"]


def cast(fn, device_type="cpu"):
    """A function of what was rounded to 16 bits."""
    policy = jamp.Policy.load("cpu").with_rules(lower=["neg"])

    def rounded(x):
        return fn(lax.neg(lax.neg(x)))

    return jamp.autocast(rounded, policy=policy, dtype=LOW, device_type=device_type)


def by_hand(fn):
    return lambda x: fn(x.astype(LOW))


def added_up(fn):
    """The sum of floating results, each times another number."""

    def total(x):
        floats = [y for y in jax.tree.leaves(fn(x)) if jnp.issubdtype(y.dtype, LOW)]
        return sum((y * jnp.arange(y.size).reshape(y.shape)).sum() for y in floats)

    return total


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(flushed(a), flushed(b))


def flushed(array):
    """In float32, without subnormals: its maximum flushes them on some processors."""
    wide = np.float32(array)
    return np.where(np.abs(wide) < np.finfo(np.float32).tiny, 0, wide)


def test_results_are_those_of_jax():
    check_each(
        OPERATIONS.items(),
        lambda row: same(jax.jit(cast(row[1]))(X), jax.jit(by_hand(row[1]))(X)),
    )


def test_what_is_equal_stays_equal_in_one_program():
    """XLA may spare one of two roundings of what is compared, but not one of both."""

    def compared(x, w):
        h = x @ w
        kept = jnp.maximum(h, 0)
        return h == kept, h >= 0

    rows = jax.random.normal(jax.random.key(0), (2, 32, 32))
    found = jax.jit(jamp.autocast(compared, dtype=LOW))(*rows)
    np.testing.assert_array_equal(*found)


CHOSEN = {
    "the larger": lambda a, b: (jnp.maximum(a, b), jnp.where(a > b, a, b)),
    "the smaller": lambda a, b: (jnp.minimum(a, b), jnp.where(a < b, a, b)),
    "clip": lambda a, b: (
        jnp.clip(a, b, b + 1),
        jnp.where(a < b, b, a).clip(max=b + 1),
    ),
}


@pytest.mark.parametrize("wide", [False, True], ids=["in 16 bits", "in float32"])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_differs_in_no_bit_from_what_it_was_chosen_of(name, wide):
    def differences(x, v, w):
        found = CHOSEN[name](x @ v * 1.37, x @ w * 0.73)
        left, right = (a.astype(jnp.float32) if wide else a for a in found)
        return left - right

    rows = jax.random.normal(jax.random.key(0), (3, 64, 64))
    found = jax.jit(jamp.autocast(differences, dtype=LOW))(*rows)
    assert not found.any()


def test_results_are_those_of_jax_outside_of_jit():
    check_each(
        OPERATIONS.items(), lambda row: same(cast(row[1])(X), by_hand(row[1])(X))
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_results_of_a_batch_are_those_of_jax(axis):
    X3 = np.stack([X, X[::-1], X.T], axis)

    def check(row):
        found, expected = (
            jax.jit(jax.vmap(transform(row[1]), axis)) for transform in (cast, by_hand)
        )
        same(found(X3), expected(X3))

    check_each(OPERATIONS.items(), check)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_jax(name):
    fn = OPERATIONS[name]
    found, expected = (
        jax.jit(jax.grad(added_up(transform(fn))))(FINITE)
        for transform in (cast, by_hand)
    )
    same(found, expected)


def test_gradients_of_a_batch_are_those_of_jax():
    def gradient(transform):
        batched = jax.vmap(transform(OPERATIONS["max of a number"]))
        return jax.jit(jax.grad(added_up(batched)))

    same(gradient(cast)(FINITE), gradient(by_hand)(FINITE))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_backward_pass_keeps_what_that_of_jax_keeps(name):
    fn = OPERATIONS[name]

    def kept(transform):
        _, pullback = jax.vjp(lambda x: jax.tree.leaves(transform(fn)(x))[0], FINITE)
        return sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(pullback))

    assert kept(cast) == kept(by_hand)


def test_a_cpu_compares_nothing_in_16_bits():
    """It does by hand, so that this would be seen."""

    def compared(fn):
        text = jax.jit(jax.grad(added_up(fn))).lower(FINITE).as_text()
        lines = re.findall(r"stablehlo\.(?:compare|maximum|minimum|clamp).*", text)
        assert lines
        return [line for line in lines if "bf16" in line]

    def network(x):
        return jnp.clip(jax.nn.relu(x), -1, 1) + jax.nn.relu6(x) * (x > x[:, ::-1])

    assert compared(by_hand(network))
    assert not compared(cast(network))
    # Nor of what is in 16 bits as it was written.
    in_16_bits = jamp.autocast(network, device_type="cpu")
    assert not compared(lambda x: in_16_bits(x.astype(LOW)))


def test_traced_programs_compare_in_16_bits_everywhere():
    for device_type in ("cpu", "gpu"):
        program = jax.make_jaxpr(cast(OPERATIONS["max"], device_type))(X)
        assert operand_dtypes(program, "max") == [("bfloat16", "bfloat16")]
