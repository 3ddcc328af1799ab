"""Gradients of several readers in float32 are added up before they are rounded.

Also where some of them stand in programs of their own, as in loops and branches, or
read parts of a value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh
from devices import LOW, each_device
from jax import P, lax

import jamp


def total(h):
    return jnp.exp(h).sum()


def added(body, h, length=8):
    """What a loop adds up that closes over some array."""
    step = lambda sum_, scale: (sum_ + scale * body(h), None)  # noqa: E731
    return lax.scan(step, 0.0, jnp.ones(length))[0]


def on_devices(h):
    parts = {"mesh": mesh(i=4), "in_specs": P("i"), "out_specs": P()}
    return jax.shard_map(lambda part: lax.psum(total(part), "i"), **parts)(h)


# Each is eight times the total.
WAYS = {
    "scan": lambda h: added(total, h),
    "fori_loop": lambda h: lax.fori_loop(0, 8, lambda i, sum_: sum_ + total(h), 0.0),
    "map": lambda h: lax.map(lambda scale: scale * total(h), jnp.ones(8)).sum(),
    "scan over it": lambda h: (
        8 * lax.scan(lambda sum_, row: (sum_ + total(row), None), 0.0, h)[0]
    ),
    "two scans": lambda h: added(total, h, 4) + added(total, h, 4),
    "scan in a scan": lambda h: added(lambda h: added(total, h, 2), h, 4),
    "jit": lambda h: 8 * jax.jit(total)(h),
    "jit in a scan": lambda h: added(jax.jit(total), h),
    "checkpoint": lambda h: 8 * jax.checkpoint(total)(h),
    "checkpoint in a scan": lambda h: added(jax.checkpoint(total), h),
    "scan in a checkpoint": lambda h: jax.checkpoint(lambda h: added(total, h))(h),
    "branch": lambda h: 8 * lax.cond(h[0, 0] < 100, total, lambda h: 0.0, h),
    "shard_map": lambda h: 8 * on_devices(h),
    "branch in a scan": lambda h: added(
        lambda g: lax.cond(g[0, 0] < 100, total, lambda g: 0.0, h), h
    ),
}


def cancelling(way):
    """A loss, of most of whose gradient nothing is left, and its weights."""
    rng = np.random.default_rng(0)
    w, x, c = (
        rng.standard_normal(s).astype("float32") for s in ((16, 8), (12, 16), (12, 8))
    )

    def loss(w):
        h = x @ w
        return 100 * (way(h) - 8 * total(h)) + jnp.sum(c * jnp.exp(h))

    return loss, w / 8


def assert_near(found, expected, device):
    error = np.linalg.norm(np.float32(found) - expected) / np.linalg.norm(expected)
    assert error < jnp.finfo(LOW[device]).eps


@pytest.mark.numbers
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_device
def test_gradients_that_cancel_are_added_in_float32(way, device):
    loss, w = cancelling(way)
    found = jax.grad(jamp.autocast(loss, device_type=device))(w)
    assert_near(found, jax.grad(loss)(w), device)


# What a branch computes for its gradient a loop saves in 16 bits, on CPUs.
INSIDE = {name: way for name, way in WAYS.items() if name != "branch in a scan"}


@pytest.mark.parametrize("way", INSIDE.values(), ids=INSIDE)
@each_device
def test_so_they_are_where_the_gradient_is_taken_inside(way, device):
    loss, w = cancelling(way)
    found = jamp.autocast(jax.grad(loss), device_type=device)(w)
    assert_near(found, jax.grad(loss)(w), device)


@each_device
def test_what_jax_moves_in_front_of_a_differentiated_loop_is_not_rounded(device):
    rng = np.random.default_rng(0)
    w, x, noise = (
        rng.standard_normal(s).astype("float32") for s in ((6, 4), (8, 6), (200, 8, 4))
    )

    def loss(w):
        drift = x @ w
        # 1 + 0.001 * drift is the same for all steps, and 1 in 16 bits.
        step = lambda s, e: (s * (1 + 0.001 * drift + 0.01 * e), None)  # noqa: E731
        return jnp.mean(lax.scan(step, jnp.ones((8, 4)), noise)[0] ** 2)

    inside = jamp.autocast(jax.value_and_grad(loss), device_type=device)(w)
    expected = jax.value_and_grad(loss)(w)
    for found, wanted in zip(inside, expected, strict=True):
        assert_near(found, wanted, device)


def of_numbers(*shape):
    return jnp.float32(np.random.default_rng(len(shape)).standard_normal(shape))


NEAR_ONE = 1 + 0.1 * of_numbers(64, 64)


def lambda_returns(v):
    deltas = NEAR_ONE[:, 1:] + 0.99 * v[:, 1:] - v[:, :-1]
    step = lambda sum_, delta: (delta + 0.94 * sum_,) * 2  # noqa: E731
    advantages = lax.scan(step, jnp.zeros(64), deltas.T, reverse=True)[1].T
    return jnp.sum(NEAR_ONE[:, 1:] * (advantages + v[:, :-1]))


# Sums of what cancels, of which most of the gradient is what is left.
OF_PARTS = {
    "slices": lambda v: jnp.sum(NEAR_ONE[:, 1:] * (v[:, 1:] - v[:, :-1])),
    "a flip": lambda v: jnp.sum(NEAR_ONE * (v - v[:, ::-1])),
    "a transpose": lambda v: jnp.sum(NEAR_ONE * (v - v.T)),
    "pairs": lambda v: jnp.sum(
        (NEAR_ONE[:, None] + NEAR_ONE) * (v[:, :, None] - v[:, None, :])
    ),
    "a split": lambda v: jnp.sum(
        NEAR_ONE[:, :32] * (jnp.split(v, 2, axis=1)[0] - v[:, 32:])
    ),
    "reshaped rows": lambda v: jnp.sum(
        NEAR_ONE.ravel() * (v.reshape(-1) - v[:, ::-1].reshape(-1))
    ),
    "jnp.diff": lambda v: jnp.sum(NEAR_ONE[:, 1:] * jnp.diff(v, axis=1)),
    "jnp.roll": lambda v: jnp.sum(NEAR_ONE * (v - jnp.roll(v, 1, 1))),
    "lambda returns": lambda_returns,
}


@pytest.mark.parametrize("name", OF_PARTS)
@each_device
def test_so_are_those_of_readers_of_parts(name, device):
    x, w = of_numbers(64, 64, 32), of_numbers(32) / 8
    loss = lambda w: OF_PARTS[name](x @ w)  # noqa: E731
    found = jax.grad(jamp.autocast(loss, device_type=device))(w)
    assert_near(found, jax.grad(loss)(w), device)


@each_device
def test_a_difference_of_parts_that_is_read_in_float32_is_not_rounded(device):
    x, w = of_numbers(64, 64, 32), of_numbers(32) / 8
    fn = jamp.autocast(lambda x, w: OF_PARTS["slices"](x @ w), device_type=device)
    rounded = (x.astype(LOW[device]) @ w.astype(LOW[device])).astype(jnp.float32)
    spacing = jnp.finfo(LOW[device]).eps * jnp.abs(rounded).mean()
    found, wanted = fn(x, w), OF_PARTS["slices"](rounded)
    assert abs(found - wanted) < spacing
