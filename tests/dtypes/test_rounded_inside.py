"""What a loop, a branch, a checkpoint or a scatter reads rounded, all read rounded.

Of two versions of one number, one would exceed its own maximum, and what cancels would
leave the rounding, divided by a small number or in an exponential.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp

RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.normal(size=(n, 8)), jnp.float32) for n in (16, 32))
DEVICES = pytest.mark.parametrize("device_type", ["cpu", "gpu"])


def logits(a, b, scale):
    unit = [v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b)]
    return (unit[0] @ unit[1].T) * scale


def largest(rows):
    return rows.max(-1)


START = jnp.full(16, -jnp.inf)
LARGEST = {
    "map": lambda h: lax.map(jnp.max, h),
    "scan": lambda h: lax.scan(lambda c, x: (jnp.maximum(c, x), None), START, h.T)[0],
    "fori_loop": lambda h: lax.fori_loop(
        0, 32, lambda i, c: jnp.maximum(c, h[:, i]), START
    ),
    "while_loop": lambda h: lax.while_loop(
        lambda c: c[0] < 32,
        lambda c: (c[0] + 1, jnp.maximum(c[1], h[:, c[0]])),
        (0, START),
    )[1],
    "checkpoint": lambda h: jax.checkpoint(largest)(h).astype(jnp.float32),
    "cond": lambda h: lax.cond(h[0, 0] > -1e9, largest, lambda h: h.min(-1), h).astype(
        jnp.float32
    ),
    "scatter": lambda h: START.at[jnp.arange(16)].max(h.max(-1)),
    "scatter by rows": lambda h: START.at[jnp.repeat(jnp.arange(16), 32)].max(
        h.ravel()
    ),
    "set": lambda h: START.at[:].set(h.max(-1)),
    "of a view": lambda h: lax.map(jnp.max, (2 * h).T.T) / 2,
    "in a jitted function": jax.jit(lambda h: lax.map(jnp.max, h)),
}


@DEVICES
@pytest.mark.parametrize("form", LARGEST)
def test_a_row_holds_its_largest_number(form, device_type):
    def holds(a, b, scale):
        h = logits(a, b, scale)
        return (h >= LARGEST[form](h)[:, None]).any(-1)

    assert jamp.autocast(holds, device_type=device_type)(A, B, jnp.float32(100)).all()


MASK = jnp.asarray(RNG.random((16, 32)) > 0.3)
MASKED = {
    "by a sum": lambda h: h + jnp.where(MASK, 0.0, -1e4),
    "by a difference": lambda h: h - jnp.where(MASK, 0.0, jnp.inf),
}


@DEVICES
@pytest.mark.parametrize("form", MASKED)
def test_masked_probabilities_are_those_of_what_the_mask_leaves(form, device_type):
    @functools.partial(jamp.autocast, device_type=device_type)
    def holds(a, b, scale):
        h = logits(a, b, scale)
        masked = MASKED[form](h)
        found = (h >= lax.map(jnp.max, masked)[:, None]) & MASK
        log_sum = lax.map(jax.nn.logsumexp, masked)
        return found.any(-1), jnp.where(MASK, jnp.exp(h - log_sum[:, None]), 0).sum(-1)

    found, total = holds(A, B, jnp.float32(100))
    assert found.all()
    np.testing.assert_allclose(total, 1, atol=1e-3)


@DEVICES
def test_probabilities_add_up_to_one_where_their_sum_was_taken_inside(device_type):
    @functools.partial(jamp.autocast, device_type=device_type)
    def total(a, b, scale):
        h = logits(a, b, scale)
        return jnp.exp(h - lax.map(jax.nn.logsumexp, h)[:, None]).sum(-1)

    np.testing.assert_allclose(total(A, B, jnp.float32(100)), 1, atol=1e-3)


def sinkhorn(x, y, w, epsilon=0.1):
    """Marginals of an optimal transport, which are all one."""
    costs = (((x @ w)[:, None] - y @ w) ** 2).sum(-1)

    def step(duals, _):
        f, g = duals
        f = -epsilon * jax.nn.logsumexp((g - costs) / epsilon, 1)
        f -= epsilon * jnp.log(16.0)
        g = -epsilon * jax.nn.logsumexp((f[:, None] - costs) / epsilon, 0)
        return (f, g - epsilon * jnp.log(12.0)), None

    (f, g), _ = lax.scan(step, (jnp.zeros(16), jnp.zeros(12)), None, length=50)
    plan = jnp.exp((f[:, None] + g - costs) / epsilon)
    return plan.sum(0) * 12, (plan * costs).sum()


def test_duals_of_optimal_transport_fit_the_costs_outside_of_their_loop():
    x, y = 3 * A, B[:12]
    w = jnp.asarray(RNG.normal(size=(8, 8)) / 8**0.5, jnp.float32)
    marginals, cost = jamp.autocast(sinkhorn, device_type="cpu")(x, y, w)
    np.testing.assert_allclose(marginals, 1, atol=1e-3)
    np.testing.assert_allclose(cost, sinkhorn(x, y, w)[1], rtol=0.02)
