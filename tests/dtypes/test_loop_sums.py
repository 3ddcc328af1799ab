"""What a loop adds up is kept in float32 between its steps, and read in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh
from devices import LOW, each_device
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jaxprs import equations, traced
from rounded_once import TERMS, assert_rounded_once, in_16_bits, values

import jamp


def added_in_turn(h):
    return lax.scan(lambda c, x: (c + x, None), h[0], h[1:])[0]


def added_by_index(h):
    return lax.fori_loop(1, TERMS, lambda i, c: h[i] + c, h[0])


def added_while(h):
    def step(state):
        return state[0] + 1, state[1] + h[state[0]]

    return lax.while_loop(lambda state: state[0] < TERMS, step, (1, h[0]))[1]


def added_by_a_jitted_step(h):
    step = jax.jit(lambda c, x: (jnp.where(x > 0, c + x, c), None))
    return lax.scan(step, h[0], h[1:])[0]


def added_by_a_checkpointed_step(h):
    return lax.scan(jax.checkpoint(lambda c, x: (c + x, None)), h[0], h[1:])[0]


def added_in_nested_loops(h):
    return lax.scan(
        lambda c, row: (lax.scan(lambda c, x: (c + x, None), c, row)[0], None),
        h[0] * 0,
        h.reshape(-1, 100),
    )[0]


def added_in_a_branch(h):
    def step(total, x):
        return jax.lax.cond(x > 0, lambda: total + x, lambda: total), total

    return lax.scan(step, h[0], h[1:])[0]


def scattered_in_turn(h):
    start = h[:1] * 0
    return lax.scan(lambda c, x: (c.at[0].add(x), None), start, h)[0]


@each_device
def test_what_a_loop_averages_is_rounded_once(device):
    low = LOW[device]
    x = jnp.stack([values(low, 2000, 1.0)] * 2, 1)

    def fn(h):
        step = lambda c, x: (0.995 * c + x / 200, None)  # noqa: E731
        return lax.scan(step, h[0], h[1:])[0]

    found = jamp.autocast(lambda x: fn(x @ jnp.eye(2)), device_type=device)(x)
    assert found.dtype == low
    assert_rounded_once(found, fn(x), low)


LOOPS = {
    "scan": added_in_turn,
    "fori_loop": added_by_index,
    "while_loop": added_while,
    "jit": added_by_a_jitted_step,
    "checkpoint": added_by_a_checkpointed_step,
    "nested": added_in_nested_loops,
    "branch": added_in_a_branch,
    "scatter": scattered_in_turn,
}


@each_device
@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_adds_up_is_rounded_once(name, device):
    x, low = values(LOW[device]), LOW[device]
    fn = jax.jit(in_16_bits(LOOPS[name], device))
    found = fn(x)
    assert found.dtype == low
    assert_rounded_once(found, np.float64(x).sum(), low)


def soft_minimum(c, x):
    return -2 * jax.nn.logsumexp(-jnp.stack([c, jnp.roll(c, 1)]) / 2, axis=0) + x[0]


def on_devices(c, x):
    grid = mesh(i=4)
    return jax.shard_map(jnp.add, mesh=grid, in_specs=P("i"), out_specs=P("i"))(c, x[0])


RECURRENCES = {
    "max": lambda c, x: jnp.max(c[:, None] + x, 0),
    "logsumexp": lambda c, x: jax.nn.logsumexp(c[:, None] + x, axis=0),
    "logaddexp": lambda c, x: jnp.logaddexp(c[::-1], x[0]),
    "soft_minimum": soft_minimum,
    "split": lambda c, x: jnp.concatenate(jnp.split(c, 2)[::-1]) + x[0],
    "sum": lambda c, x: jnp.sum(jnp.stack([c, *x]), 0),
    "nansum": lambda c, x: jnp.nansum(jnp.stack([c, *x]), 0),
    "relu": lambda c, x: jax.nn.relu(c + x[0] - 1),
    "clip": lambda c, x: jnp.clip(c + x[0], 0, 50),
    "remainder": lambda c, x: jnp.mod(c + x[0], 7),
    "branch": lambda c, x: lax.cond(x[0, 0] > 1, lambda: c[::-1], lambda: c + x[0]),
    "cumlogsumexp": lambda c, x: lax.cumlogsumexp(c) + x[0],
    "sort": lambda c, x: lax.sort(c) + x[0],
    "top_k": lambda c, x: lax.top_k(c, 4)[0] + x[0],
    "set": lambda c, x: c.at[1:].set(c[:-1] + x[0, 1:]),
    "named": lambda c, x: checkpoint_name(c + x[0], "sum"),
    "put": lambda c, x: jax.device_put((x, c + x[0]))[1],
    "barrier": lambda c, x: lax.optimization_barrier((x, c + x[0]))[1],
    "on devices": on_devices,
    "map": lambda c, x: lax.map(sum, (c, x[0])),
    "read in a loop": lambda c, x: lax.scan(
        lambda _, row: (c + row, None), x[0], x[:1]
    )[0],
    "left by a loop": lambda c, x: lax.scan(
        lambda c, row: (c + row, c), c, jnp.stack([x[0], x[1]])
    )[1][1],
}


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_over_sums_is_rounded_once(name, device):
    low, step = LOW[device], RECURRENCES[name]
    x = values(low, (500, 4, 4), 1.0)

    def fn(x):
        h = x @ jnp.eye(4)
        return lax.scan(lambda c, x: (step(c, x), None), h[0, 0], h[1:])[0]

    def gradient(fn):
        return jax.jit(jax.grad(lambda x: jnp.sum(fn(x).astype(jnp.float32))))(x)

    cast = jamp.autocast(fn, device_type=device)
    assert_rounded_once(jax.jit(cast)(x), fn(x), low)
    assert np.abs(gradient(cast) - gradient(fn)).max() <= float(jnp.finfo(low).eps)


# By one number for each row, after something small was added.
SCALINGS = {
    "to their length": lambda c, _: c / jnp.linalg.norm(c, axis=-1, keepdims=True),
    "to their sum": lambda c, _: c / c.sum(-1, keepdims=True),
    "to their squares": lambda c, _: c * lax.rsqrt((c * c).mean(-1, keepdims=True)),
    "to a mean of zero": lambda c, _: jax.nn.standardize(c) + 2,
    "by decays of rows": lambda c, decays: c * decays[:, :1],
    "by decays of columns": lambda c, decays: c * decays[0],
}


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", SCALINGS)
def test_rows_that_a_loop_scales_are_rounded_once(name, device):
    low, scaled = LOW[device], SCALINGS[name]
    x = values(low, (500, 4, 4), 1.0)

    def fn(x, decays):
        h, decays = x @ jnp.eye(4), decays @ jnp.eye(4)
        step = lambda c, x: (scaled(c + x / 1000, decays), None)  # noqa: E731
        return lax.scan(step, h[0], h[1:])[0]

    args = x, jnp.full((4, 4), 1 - 2**-7)
    cast = jamp.autocast(fn, device_type=device)
    assert_rounded_once(jax.jit(cast)(*args), fn(*args), low)


EXCHANGES = {
    "ppermute": lambda c: lax.ppermute(c, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "all_gather": lambda c: lax.all_gather(c, "i")[(lax.axis_index("i") + 1) % 4],
    "all_to_all": lambda c: lax.all_to_all(c, "i", 0, 0, tiled=True),
    "pmax": lambda c: lax.pcast(lax.pmax(c, "i"), "i", to="varying"),
}


@each_device
@pytest.mark.parametrize("name", EXCHANGES)
def test_devices_exchange_a_loops_sum_as_it_is_kept(name, device):
    low, exchange = LOW[device], EXCHANGES[name]
    x = values(low, (500, 16), 1.0)

    def of_part(h):
        return lax.scan(lambda c, r: (exchange(c) + r, None), h[0], h)[0]

    def fn(x):
        parts = {"mesh": mesh(i=4), "in_specs": P(None, "i"), "out_specs": P("i")}
        return jax.shard_map(of_part, **parts)(x @ jnp.eye(16))

    found = jax.jit(jamp.autocast(fn, device_type=device))(x)
    assert_rounded_once(found, fn(x), low)


@each_device
def test_what_stands_beside_a_loops_sum_in_a_barrier_stays_in_16_bits(device):
    def fn(x):
        h = x @ jnp.eye(4)
        step = lambda c, r: (lax.optimization_barrier((c + r, r))[0], None)  # noqa: E731
        return lax.scan(step, h[0], h)[0]

    program = traced(jamp.autocast(fn, device_type=device), jnp.ones((8, 4)))
    barrier = "optimization_barrier"
    (found,) = [e for e in equations(program) if e.primitive.name == barrier]
    assert [var.aval.dtype for var in found.invars] == [jnp.float32, LOW[device]]


@each_device
def test_what_a_loop_adds_up_may_change_places(device):
    x, low = values(LOW[device], (600, 4), 1.0), LOW[device]

    def moved_on(x):
        """A position from the two before it, as in Verlet's integration."""
        h = x @ jnp.eye(4)
        step = lambda c, r: ((c[1], 2 * c[1] - c[0] + 1e-3 * r), None)  # noqa: E731
        return lax.scan(step, (h[0], h[0]), h)[0][1]

    found = jax.jit(jamp.autocast(moved_on, device_type=device))(x)
    assert_rounded_once(found, moved_on(x), low)


@each_device
def test_the_gradient_of_a_maximum_in_a_loop_goes_to_what_is_the_largest(device):
    """What XLA computes twice may differ; a sum that was not rounded shows it."""
    x = jnp.asarray(np.random.RandomState(89).randn(24, 4), jnp.float32)
    w = jnp.asarray(np.random.RandomState(90).randn(4, 4) / 2, jnp.float32) + jnp.eye(4)

    def loss(x, w):
        h = x @ w
        step = lambda c, r: (jnp.stack([r * 1.5, c + r * 1.1]).max(0), None)  # noqa: E731
        return jnp.sum(lax.scan(step, h[0] + h[1], h)[0].astype(jnp.float32))

    found = jax.jit(jax.grad(jamp.autocast(loss, device_type=device)))(x, w)
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(x, w), atol=0.02)


@each_device
def test_readers_of_a_loops_sum_see_16_bits(device):
    def fn(h):
        def step(total, row):
            total = total + jnp.tanh(total @ h[:4])
            return total, (total, total * row)

        return lax.scan(step, h[0], h)

    found = jax.eval_shape(in_16_bits(fn, device), jnp.ones((8, 4)))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(LOW[device])}


@each_device
def test_a_loops_sum_is_narrowed_for_no_branch_and_no_cast_in_float32(device):
    def fn(x):
        h = x @ jnp.eye(4)
        step = lambda c, r: (c + r, widened(jax.nn.relu(c)))  # noqa: E731
        total, wide = lax.scan(step, h[0], h)
        return wide, lax.cond(x[0, 0] > 0, lambda c: x[0], lambda c: c + 1, total)

    widened = jax.jit(lambda c: c.astype(jnp.float32))
    found = jax.eval_shape(jamp.autocast(fn, device_type=device), jnp.ones((8, 4)))
    assert [leaf.dtype for leaf in found] == [jnp.float32] * 2


@jax.custom_jvp
def ruled(c):
    return jnp.sin(c)


@ruled.defjvp
def ruled_jvp(primals, tangents):
    return ruled(*primals), tangents[0] * jax.jit(jnp.cos)(*primals)


@each_device
def test_a_rule_takes_the_16_bits_of_a_loops_sum(device):
    x = values(LOW[device], (8, 4))

    def loss(x):
        h = x @ jnp.eye(4)
        step = lambda c, r: (c + r, ruled(c + r))  # noqa: E731
        return jnp.sum(lax.scan(step, h[0], h)[1].astype(jnp.float32))

    found = jax.grad(jamp.autocast(loss, device_type=device))(x)
    np.testing.assert_allclose(found, jax.grad(loss)(x), rtol=0.02)


@each_device
def test_what_sums_are_copied_to_stays_in_16_bits(device):
    def fn(x):
        h = x @ jnp.eye(4)
        steps, last, largest = jnp.stack([h[0]] * 8), h[0], h[0]

        def step(carry, row):
            total, steps, _, largest = carry
            steps = jnp.concatenate([steps[1:], total[None]])
            return (total + row, steps, total, jnp.maximum(largest, total)), None

        return lax.scan(step, (h[0], steps, last, largest), h)[0]

    program = traced(jamp.autocast(fn, device_type=device), jnp.ones((8, 4)))
    (loop,) = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    dtypes = [var.aval.dtype for var in loop.outvars]
    assert dtypes == [jnp.float32, *[LOW[device]] * 3]


STATES = {
    "hidden_state": lambda c, row, w: jnp.tanh(c @ w + row @ w),
    "masked": lambda c, row, w: jnp.where(row > 0, jnp.tanh(row @ w), c),
    "largest_yet": lambda c, row, w: jnp.maximum(c, row @ w),
    "largest_yet_in_a_loop": lambda c, row, w: lax.fori_loop(
        0, 2, lambda _, largest: jnp.maximum(c, largest), row @ w
    ),
    "shifted": lambda c, row, w: jnp.concatenate([c[1:], (row @ w)[:1]]),
}


@each_device
@pytest.mark.parametrize("name", STATES)
def test_a_state_to_which_nothing_is_added_stays_in_16_bits(name, device):
    def fn(h, w):
        return lax.scan(lambda c, row: (STATES[name](c, row, w), c), h[0] @ w, h)

    program = traced(jamp.autocast(fn, device_type=device), *[jnp.ones((4, 4))] * 2)
    loop = next(eqn for eqn in equations(program) if eqn.primitive.name == "scan")
    assert loop.outvars[0].aval.dtype == LOW[device]
