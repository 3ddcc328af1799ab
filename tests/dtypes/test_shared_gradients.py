"""Gradients of several readers in float32 are added up before they are rounded.

Also where some of them stand in programs of their own, as in loops and branches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax import lax

import jamp


def total(h):
    return jnp.exp(h).sum()


def added(body, h, length=8):
    """What a loop adds up that closes over some array."""
    step = lambda sum_, scale: (sum_ + scale * body(h), None)  # noqa: E731
    return lax.scan(step, 0.0, jnp.ones(length))[0]


# Each is eight times the total.
WAYS = {
    "scan": lambda h: added(total, h),
    "fori_loop": lambda h: lax.fori_loop(0, 8, lambda i, sum_: sum_ + total(h), 0.0),
    "map": lambda h: lax.map(lambda scale: scale * total(h), jnp.ones(8)).sum(),
    "two scans": lambda h: added(total, h, 4) + added(total, h, 4),
    "scan in a scan": lambda h: added(lambda h: added(total, h, 2), h, 4),
    "jit": lambda h: 8 * jax.jit(total)(h),
    "jit in a scan": lambda h: added(jax.jit(total), h),
    "checkpoint": lambda h: 8 * jax.checkpoint(total)(h),
    "checkpoint in a scan": lambda h: added(jax.checkpoint(total), h),
    "scan in a checkpoint": lambda h: jax.checkpoint(lambda h: added(total, h))(h),
    "branch": lambda h: 8 * lax.cond(h[0, 0] < 100, total, lambda h: 0.0, h),
    "branch in a scan": lambda h: added(
        lambda g: lax.cond(g[0, 0] < 100, total, lambda g: 0.0, h), h
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_device
def test_gradients_that_cancel_are_added_in_float32(way, device):
    rng = np.random.default_rng(0)
    w, x, c = (
        rng.standard_normal(s).astype("float32") for s in ((16, 8), (12, 16), (12, 8))
    )

    def loss(w):
        h = x @ w
        cancels = way(h) - 8 * total(h)
        return 100 * cancels + jnp.sum(c * jnp.exp(h))

    found = jax.grad(jamp.autocast(loss, device_type=device))(w / 8)
    expected = jax.grad(loss)(w / 8)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < jnp.finfo(LOW[device]).eps


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
        error = np.linalg.norm(np.float32(found) - wanted) / np.linalg.norm(wanted)
        assert error < jnp.finfo(LOW[device]).eps
