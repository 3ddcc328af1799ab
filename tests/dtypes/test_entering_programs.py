"""What enters a loop, a branch or a checkpoint, and is read in float32 inside alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, traced

import jamp

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 8), dtype=np.float32)
W = RNG.standard_normal((8, 8), dtype=np.float32) / 3
H = np.cos(X)
POLICIES = {"cpu": (jnp.bfloat16, 2**-8), "gpu": (jnp.float16, 2**-11)}


def forgotten(f, h):
    return (1 - f) * h


def gate(w):
    """A sigmoid near 1: rounded, it leaves next to nothing of `1 - f`."""
    return jax.nn.sigmoid(X @ w + 6)


def decay(w):
    return jnp.exp(-1e-3 * (1 + jnp.tanh(X @ w)))


def in_a_loop_over_layers(f, h):
    def layer(h, _):
        return (1 - f) * h + 0.1, None

    return jax.lax.scan(layer, h, length=2)[0]


ENTRIES = {
    "scan": lambda f, h: jax.lax.scan(lambda c, x: (c, forgotten(*x)), 0, (f, h))[1],
    "map": lambda f, h: jax.lax.map(lambda x: forgotten(*x), (f, h)),
    "shared by iterations": in_a_loop_over_layers,
    "cond": lambda f, h: jax.lax.cond(h[0, 0] < 2, forgotten, lambda f, h: h, f, h),
    "switch": lambda f, h: jax.lax.switch(0, [forgotten, jnp.add], f, h),
}
CHECKPOINT = {"checkpoint": jax.checkpoint(forgotten)}
CASES = [(gate, name) for name in ENTRIES | CHECKPOINT]
CASES += [(decay, name) for name in ENTRIES]


def error(found, wanted):
    found, wanted = (np.asarray(array, np.float64) for array in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("device_type", POLICIES)
@pytest.mark.parametrize(("made", "name"), CASES)
def test_it_is_not_rounded(made, name, device_type):
    entry, (dtype, roundoff) = (ENTRIES | CHECKPOINT)[name], POLICIES[device_type]
    loss = lambda w: jnp.sum(entry(made(w), H) * H, dtype=jnp.float32)  # noqa: E731
    fn = jamp.autocast(loss, device_type=device_type, dtype=dtype)
    found, wanted = (jax.jit(jax.value_and_grad(f))(W) for f in (fn, loss))
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 8 * roundoff


@pytest.mark.parametrize("device_type", POLICIES)
def test_a_gate_that_is_scanned_over_forgets_as_in_float32(device_type):
    """As in SRU, QRNN, minGRU and HGRN, which compute gates for all times first."""

    def network(w):
        def step(h, inputs):
            f, g = inputs
            h = f * h + (1 - f) * g
            return h, h

        inputs = gate(w), jnp.tanh(X @ w.T)
        return jax.lax.scan(step, jnp.zeros(8), inputs)[1]

    dtype, roundoff = POLICIES[device_type]
    found = jamp.autocast(network, device_type=device_type, dtype=dtype)(W)
    assert error(found, network(W)) < 8 * roundoff


@pytest.mark.parametrize("device_type", POLICIES)
@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_without_operations_may_be_given_float32(taken, device_type):
    def loss(w):
        centred = lambda h: h - jnp.mean(h, axis=-1, keepdims=True)  # noqa: E731
        h = jax.lax.cond(taken, centred, lambda h: h, X @ w)
        return jnp.mean(h**2)

    dtype, roundoff = POLICIES[device_type]
    fn = jamp.autocast(jax.grad(loss), device_type=device_type, dtype=dtype)
    assert error(fn(W), jax.grad(loss)(W)) < 8 * roundoff


def test_what_a_product_reads_inside_enters_in_16_bits():
    def fn(w):
        step = lambda c, x: (c, (1 - x) @ w + jnp.sum(x))  # noqa: E731
        return jax.lax.scan(step, 0.0, gate(w))[1]

    (scan,) = [
        e for e in equations(traced(jamp.autocast(fn), W)) if "scan" in str(e.primitive)
    ]
    dtypes = [var.aval.dtype for var in scan.invars if var.aval.shape == (16, 8)]
    assert dtypes == [jnp.bfloat16]


def test_an_operation_that_rounded_probabilities_are_banned_from_takes_it():
    fn = lambda w: jax.lax.map(lambda f: jnp.log1p(-f * 0.999), gate(w))  # noqa: E731
    found = jamp.autocast(fn, device_type="gpu")(W)
    assert error(found, fn(W)) < 2**-8


def test_what_a_checkpoint_saves_has_16_bits():
    fn = jax.checkpoint(lambda x, h: jnp.sum((x - jnp.mean(x)) * h))
    loss = jamp.autocast(lambda w: fn(jnp.tanh(X @ w), H))
    made = equations(traced(loss, W))
    saved = [e for e in made if e.primitive.name == "remat2" and len(e.invars) == 2]
    assert {e.invars[0].aval.dtype for e in saved} == {jnp.dtype(jnp.bfloat16)}
