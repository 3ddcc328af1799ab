"""What a loop finds in its first iteration: what came in, as one by one they would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax import lax
from jaxprs import equations, traced

import jamp

STEPS = 4
W = jnp.asarray(np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0])
W = W.astype(jnp.float32)
# Out of float16's range, and of positions that bfloat16 tells apart.
START = 1e6 + jnp.linspace(0, 3000, 8)


def scaled(h):
    return h / jnp.sqrt((h * h).sum() + 1)


def spread(h):
    return h.max() - h.min()


def layer(h, w):
    return w @ scaled(h)


# Steps of a loop: from what it carries, and a matrix, to that and what it leaves.
STEPS_OF = {
    "divides by its length": lambda h, w: (w @ scaled(h), ()),
    "leaves a distance": lambda h, w: (w @ scaled(h), spread(h)),
    "leaves it as it came": lambda h, w: (w @ scaled(h), h),
    "in a jitted function": lambda h, w: (jax.jit(layer)(h, w), ()),
    "in a checkpoint": lambda h, w: (jax.checkpoint(layer)(h, w), ()),
    "in a branch": lambda h, w: (
        lax.cond(h[0] > 0, layer, lambda h, w: -layer(-h, w), h, w),
        (),
    ),
    "in a loop inside": lambda h, w: (
        lax.scan(lambda g, _: (w @ (g + scaled(h)), ()), h * 0, length=2)[0],
        (),
    ),
    "moved to another place": lambda c, w: ((c[1], w @ scaled(c[0])), spread(c[1])),
}
NESTED = {"moved to another place"}


def case(name):
    step = STEPS_OF[name]
    start = (START, START + 100) if name in NESTED else START

    def scanned(start, w):
        return lax.scan(lambda h, _: step(h, w), start, length=STEPS)

    def one_by_one(h, w):
        left = []
        for _ in range(STEPS):
            h, y = step(h, w)
            left.append(y)
        return h, jax.tree.map(lambda *ys: jnp.stack(ys), *left)

    return scanned, one_by_one, start


def assert_close(found, expected, eps):
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        ours, theirs = np.float64(ours), np.float64(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=16 * eps, atol=16 * eps)


@each_device
@pytest.mark.parametrize("name", STEPS_OF)
def test_a_loop_reads_its_start_as_the_first_of_single_steps_does(name, device):
    scanned, one_by_one, start = case(name)
    found = jamp.autocast(scanned, device_type=device)(start, W)
    steps = jamp.autocast(one_by_one, device_type=device)(start, W)
    eps = float(jnp.finfo(LOW[device]).eps)
    assert_close(found, scanned(start, W), eps)
    assert_close(found, steps, eps)
    # Of what changes places, a loop leaves float32: after one step it may be a start.
    if name not in NESTED:
        assert found[0].dtype == steps[0].dtype == LOW[device]


@each_device
def test_what_a_step_moves_leaves_a_loop_of_one_as_it_came(device):
    def fn(start, w):
        swapped = STEPS_OF["moved to another place"]
        return lax.scan(lambda c, _: swapped(c, w), start, length=1)[0][0]

    found = jamp.autocast(fn, device_type=device)((START, START + 100), W)
    np.testing.assert_array_equal(found, START + 100)


@each_device
def test_the_gradient_to_a_loops_start_is_that_of_float32(device):
    scanned, _, start = case("divides by its length")

    def loss(start, w):
        return (scanned(start, w)[0] * jnp.arange(8.0)).sum()

    expected = jax.grad(loss, (0, 1))(start, W)
    found = jax.grad(jamp.autocast(loss, device_type=device), (0, 1))(start, W)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        atol = 16 * float(jnp.finfo(LOW[device]).eps) * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=atol)


# A loop that has not run gives back what came in.
EMPTY = {
    "scan": lambda h, w: lax.scan(lambda h, _: (w @ h, ()), h, length=0)[0],
    "fori_loop": lambda h, w: lax.fori_loop(0, 0, lambda i, h: w @ h, h),
    "while_loop": lambda h, w: lax.while_loop(lambda h: h[0] < 0, lambda h: w @ h, h),
}


@each_device
@pytest.mark.parametrize("name", EMPTY)
def test_a_loop_without_iterations_gives_back_its_start(name, device):
    found = jamp.autocast(EMPTY[name], device_type=device)(START, W)
    np.testing.assert_array_equal(found, START)


@each_device
def test_a_loop_starts_at_a_number_that_16_bits_do_not_hold(device):
    def steps(b, w):
        def goes_on(carry):
            error, _, count = carry
            # In float16's 16 bits its start is an infinity.
            return (error > 1e-3) & (error < jnp.inf) & (count < 20)

        def step(carry):
            _, h, count = carry
            h = 0.5 * (w @ h)
            return h @ h, h, count + 1

        return lax.while_loop(goes_on, step, (1e6, b, 0))[2]

    expected = steps(jnp.ones(8), W)
    assert expected == 7
    assert jamp.autocast(steps, device_type=device)(jnp.ones(8), W) == expected


MULTIPLIED = {
    "at once": lambda h, w: w @ h,
    "after relu": lambda h, w: w @ jax.nn.relu(h),
    "after tanh": lambda h, w: w @ jnp.tanh(h),
    "turned": lambda h, w: h[::-1] @ w,
    "in a checkpointed layer": jax.checkpoint(lambda h, w: w @ jax.nn.relu(h)),
}


@each_device
@pytest.mark.parametrize("name", MULTIPLIED)
def test_what_a_loop_only_multiplies_it_carries_in_16_bits(name, device):
    def fn(h, w):
        return lax.scan(lambda h, _: (MULTIPLIED[name](h, w), ()), h, length=STEPS)[0]

    program = traced(jamp.autocast(fn, device_type=device), jnp.ones(8), W)
    (loop,) = (eqn for eqn in equations(program) if eqn.primitive.name == "scan")
    assert [var.aval.dtype for var in loop.outvars] == [LOW[device]]


@pytest.mark.parametrize("name", MULTIPLIED)
def test_what_a_loop_only_multiplies_it_keeps_in_16_bits_for_a_gradient(name):
    def loss(h, w):
        step = MULTIPLIED[name]
        return lax.scan(lambda h, _: (step(h, w), ()), h, length=STEPS)[0].mean()

    gradient = jamp.autocast(jax.grad(loss, (0, 1)), device_type="gpu")
    program = traced(gradient, jnp.ones((8, 8)), W)
    first, second = (e for e in equations(program) if e.primitive.name == "scan")
    kept = {v.aval.dtype for v in first.outvars if v in second.invars}
    assert jnp.dtype(jnp.float16) in kept
    assert jnp.dtype(jnp.float32) not in kept


@each_device
def test_a_loop_compares_its_start_as_it_came(device):
    def fn(h, w):
        def step(h, _):
            return w @ (h > 1_001_500).astype(jnp.float32), ()

        return lax.scan(step, h, length=1)[0]

    found = jamp.autocast(fn, device_type=device)(START, W)
    np.testing.assert_allclose(found, fn(START, W), atol=1e-2)


@pytest.mark.parametrize(
    "device, function, start",
    [
        ("gpu", jnp.sign, 1e-9),  # zero in float16
        ("cpu", jnp.exp, 6.015),  # between two numbers of bfloat16
    ],
)
def test_a_loop_takes_a_function_of_its_start_as_it_came(device, function, start):
    def fn(h):
        return lax.scan(lambda h, _: (jnp.eye(8) @ function(h), ()), h, length=1)[0]

    found = jamp.autocast(fn, device_type=device)(jnp.full(8, start))
    expected = fn(jnp.full(8, start))
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=1e-2)
