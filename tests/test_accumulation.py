"""What is added up is added in float32, and rounded once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh
from jax import P, lax
from jaxprs import equations, traced

import jamp

TERMS = 20_000
LOW = {"gpu": jnp.float16, "cpu": jnp.bfloat16}
SUMS = ("add_any", "cumsum", "cumprod", "psum", "psum_invariant", "reduce_scatter")
SUMS += ("reduce_sum", "reduce_window_sum", "scatter-add", "scatter-mul", "scatter-sub")
SUMS += ("select_and_scatter_add",)
GATHERS = ("all_gather", "all_gather_invariant")
ROWS = np.zeros(TERMS, int)

each_device = pytest.mark.parametrize("device", LOW)


def values(low, size=TERMS, scale=0.01):
    """Positive numbers of a 16-bit dtype, in float32."""
    drawn = np.random.default_rng(0).uniform(0.5, 1.5, size) * scale
    return jnp.float32(jnp.asarray(drawn, low))


def in_16_bits(fn, device):
    """A function of float32 arrays under autocast, which it takes in 16 bits."""
    low = LOW[device]
    return jamp.autocast(
        lambda *arrays: fn(*(array.astype(low) for array in arrays)),
        device_type=device,
    )


def assert_rounded_once(found, exact, low):
    """Holds numbers to the nearest ones of the 16-bit dtype, or one next to them."""
    exact = np.asarray(exact, np.float64)
    error = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact)
    assert error.max() <= 0.51 * float(jnp.finfo(low).eps)


def assert_added_in_float32(program):
    added = [
        eqn
        for eqn in equations(program)
        if eqn.primitive.name in SUMS
        # Sums over dimensions of size one add nothing up.
        and not (len(eqn.invars) == 1 and eqn.invars[0].aval.size == size_of(eqn))
    ]
    dtypes = {var.aval.dtype.name for eqn in added for var in eqn.invars}
    assert {dtype for dtype in dtypes if "float" in dtype} == {"float32"}


def size_of(eqn):
    """The size of what a sum gives; none for those over devices, and running ones."""
    return eqn.outvars[0].aval.size if eqn.primitive.name == "reduce_sum" else None


SUMMING = {
    "segment_sum": lambda h: jax.ops.segment_sum(h, ROWS, 1),
    "at_add": lambda h: jnp.zeros(1).at[ROWS].add(h),
    "at_add_to_what_came_in": lambda h: h[:1].at[ROWS[1:]].add(h[1:]),
    "at_subtract": lambda h: -jnp.zeros((1, 1)).at[ROWS].subtract(h[:, None]),
    "bincount": lambda h: jnp.bincount(ROWS, h, length=1),
    "cumsum": lambda h: lax.cumsum(h)[-1:],
    "window": lambda h: lax.reduce_window(h, 0.0, lax.add, (TERMS,), (1,), "VALID"),
}


@each_device
@pytest.mark.parametrize("name", SUMMING)
def test_a_sum_of_16_bit_numbers_is_rounded_once(name, device):
    x = values(LOW[device])
    fn = in_16_bits(SUMMING[name], device)
    assert_rounded_once(jax.jit(fn)(x), np.float64(x).sum(), LOW[device])
    assert_added_in_float32(traced(fn, x))


def decayed(left, right):
    return left[0] * right[0], left[1] * right[0] + right[1]


SCANS = {
    "sum": lambda h: lax.associative_scan(jnp.add, h, reverse=True)[:1],
    "recurrence": lambda h: lax.associative_scan(decayed, (1 - h, h))[1][-1:],
}


@each_device
@pytest.mark.parametrize("name", SCANS)
def test_an_associative_scan_is_rounded_once(name, device):
    low = LOW[device]
    x = jnp.stack([values(low, 1000)] * 2, 1)
    fn = jamp.autocast(lambda x: SCANS[name](x @ jnp.eye(2)), device_type=device)
    with jax.enable_x64(True):
        exact = SCANS[name](jnp.float64(x))
    found, pull = jax.vjp(fn, x)
    assert found.dtype == low
    assert_rounded_once(found, exact, low)
    saved = {array.dtype for array in jax.tree.leaves(pull) if array.shape == x.shape}
    assert saved <= {jnp.dtype(low)}


@each_device
def test_products_in_an_associative_scan_are_lowered(device):
    fn = partial(lax.associative_scan, jnp.matmul)
    program = traced(jamp.autocast(fn, device_type=device), jnp.ones((4, 3, 3)))
    products = [e for e in equations(program) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in products for v in e.invars[:2]} == {
        jnp.dtype(LOW[device])
    }


REPEATING = {
    "take": lambda h: jnp.take(h, ROWS),
    "indexing": lambda h: h[ROWS],
    "columns": lambda h: h[:, None][ROWS, 0],
    "repeat": lambda h: jnp.repeat(h, TERMS),
    "tile": lambda h: jnp.tile(h, TERMS),
    "dynamic_slice": lambda h: lax.map(
        lambda i: lax.dynamic_slice(h, (i,), (1,))[0], jnp.zeros(TERMS, int)
    ),
    "a loop": lambda h: lax.scan(lambda c, _: (c, h[0] * 1), 0, length=TERMS)[1],
    "dynamic_slice_of_many": lambda h: jax.vmap(
        lambda i: lax.dynamic_index_in_dim(h, i, keepdims=False)
    )(ROWS),
}


@each_device
@pytest.mark.parametrize("name", REPEATING)
def test_the_gradient_of_what_is_repeated_is_rounded_once(name, device):
    weights = values(LOW[device])
    fn = in_16_bits(REPEATING[name], device)

    def loss(x):
        out = fn(x)
        assert out.dtype == LOW[device]
        return jnp.sum(out.astype(jnp.float32) * weights)

    gradient = jax.grad(loss)
    exact = np.float64(weights).sum()
    assert_rounded_once(jax.jit(gradient)(jnp.ones(1)), exact, LOW[device])
    assert_added_in_float32(traced(gradient, jnp.ones(1)))


@each_device
def test_the_gradient_of_a_pool_whose_windows_overlap_is_rounded_once(device):
    size, low = 200, LOW[device]
    weights = values(low, size)
    pad = [(size - 1, size - 1)]
    fn = in_16_bits(
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (size,), (1,), pad), device
    )
    assert jax.eval_shape(fn, jnp.ones(1)).dtype == low
    gradient = jax.grad(lambda x: jnp.sum(fn(x).astype(jnp.float32) * weights))
    assert_rounded_once(gradient(jnp.ones(1)), np.float64(weights).sum(), low)
    assert_added_in_float32(traced(gradient, jnp.ones(1)))


OVER_DEVICES = {
    "psum": (lambda h: lax.psum(h, "i"), P()),
    "pmean": (lambda h: lax.pmean(h, "i"), P()),
    "psum_scatter": (lambda h: lax.psum_scatter(h, "i", tiled=True), P("i")),
}


@each_device
@pytest.mark.parametrize("name", OVER_DEVICES)
def test_devices_add_up_in_float32(name, device):
    reduce, out = OVER_DEVICES[name]

    def fn(h):
        return jax.shard_map(reduce, mesh=mesh(), in_specs=P("i"), out_specs=out)(h)

    cast = in_16_bits(fn, device)
    x = jnp.ones((64, 4))
    assert traced(cast, x).out_avals[0].dtype == LOW[device]
    assert_added_in_float32(traced(cast, x))


@each_device
def test_devices_add_up_the_gradient_of_what_they_share_in_float32(device):
    def fn(x, shared):
        return jax.shard_map(
            lambda x, shared: x * shared,
            mesh=mesh(),
            in_specs=(P("i"), P()),
            out_specs=P("i"),
        )(x, shared)

    def loss(*arrays):
        return in_16_bits(fn, device)(*arrays).astype(jnp.float32).sum()

    program = traced(jax.grad(loss, 1), jnp.ones((16, 4)), jnp.ones(4))
    assert_added_in_float32(program)


@each_device
def test_devices_add_up_the_gradient_of_what_they_gather_in_float32(device):
    def fn(h):
        gather = lambda h: jnp.sin(lax.all_gather(h, "i", tiled=True))  # noqa: E731
        return jax.shard_map(gather, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))(h)

    cast, x = in_16_bits(fn, device), jnp.ones((16, 4))
    gathered = [e for e in equations(traced(cast, x)) if e.primitive.name in GATHERS]
    assert {eqn.invars[0].aval.dtype for eqn in gathered} == {jnp.dtype(LOW[device])}
    assert "all_gather" in str(jamp.explain(cast)(x))
    gradient = jax.grad(lambda x: cast(x).astype(jnp.float32).sum())
    assert_added_in_float32(traced(gradient, x))
    expected = jax.grad(lambda x: fn(x).sum())(x)
    np.testing.assert_allclose(gradient(x), expected, rtol=4e-2)


@each_device
def test_devices_may_add_up_arrays_of_several_dtypes(device):
    def fn(x):
        return lax.psum((x.astype(LOW[device]), x), "i")

    shared = jax.shard_map(fn, mesh=mesh(), in_specs=P("i"), out_specs=P())
    program = traced(jamp.autocast(shared, device_type=device), jnp.ones((16, 4)))
    assert [aval.dtype for aval in program.out_avals] == [LOW[device], jnp.float32]


@each_device
def test_what_is_added_up_keeps_the_dtype_that_it_had(device):
    low = LOW[device]

    def fn(h, x):
        return (
            jnp.zeros(3).at[jnp.arange(3)].add(h),
            x.at[jnp.arange(3)].add(h),
            x.at[jnp.zeros((3, 1), int)].add(h[:, None]),
            h[::-1][jnp.arange(2)],
        )

    fn = jamp.autocast(fn, device_type=device)
    found = jax.eval_shape(fn, jnp.ones(3, low), jnp.ones(3))
    assert [result.dtype for result in found] == [low, jnp.float32, jnp.float32, low]


FULL_REDUCTIONS = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "variance": jnp.var,
    "deviation": jnp.std,
    "largest": jnp.max,
    "smallest": jnp.min,
    "logsumexp": jax.nn.logsumexp,
    "norm": jnp.linalg.norm,
    "by hand": lambda h: lax.reduce_sum_p.bind(h, axes=(0, 1), out_sharding=None),
}


@each_device
@pytest.mark.parametrize("name", FULL_REDUCTIONS)
def test_a_reduction_to_a_scalar_stays_float32(name, device):
    fn = in_16_bits(FULL_REDUCTIONS[name], device)
    found = fn(values(LOW[device], (8, 8), 1.0))
    assert found.dtype == jnp.float32
    expected = FULL_REDUCTIONS[name](values(LOW[device], (8, 8), 1.0))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@each_device
def test_a_reduced_scalar_promotes_nothing(device):
    def fn(h):
        return h - h.mean(), h / h.std(), h.mean(0), h[0, 0] + h.max()

    found = jax.eval_shape(in_16_bits(fn, device), jnp.ones((8, 8)))
    low = LOW[device]
    assert [leaf.dtype for leaf in found] == [low, low, low, jnp.float32]


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


RECURRENCES = {
    "max": lambda c, x: jnp.max(c[:, None] + x, 0),
    "logsumexp": lambda c, x: jax.nn.logsumexp(c[:, None] + x, axis=0),
    "logaddexp": lambda c, x: jnp.logaddexp(c[::-1], x[0]),
    "soft_minimum": soft_minimum,
    "split": lambda c, x: jnp.concatenate(jnp.split(c, 2)[::-1]) + x[0],
    "sum": lambda c, x: jnp.sum(jnp.stack([c, *x]), 0),
    "relu": lambda c, x: jax.nn.relu(c + x[0] - 1),
    "clip": lambda c, x: jnp.clip(c + x[0], 0, 50),
    "branch": lambda c, x: lax.cond(x[0, 0] > 1, lambda: c[::-1], lambda: c + x[0]),
    "cumlogsumexp": lambda c, x: lax.cumlogsumexp(c) + x[0],
    "sort": lambda c, x: lax.sort(c) + x[0],
    "top_k": lambda c, x: lax.top_k(c, 4)[0] + x[0],
    "set": lambda c, x: c.at[1:].set(c[:-1] + x[0, 1:]),
}


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
    "shifted": lambda c, row, w: jnp.concatenate([c[1:], (row @ w)[:1]]),
}


@each_device
@pytest.mark.parametrize("name", STATES)
def test_a_state_to_which_nothing_is_added_stays_in_16_bits(name, device):
    def fn(h, w):
        return lax.scan(lambda c, row: (STATES[name](c, row, w), c), h[0] @ w, h)

    program = traced(jamp.autocast(fn, device_type=device), *[jnp.ones((4, 4))] * 2)
    (loop,) = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    assert loop.outvars[0].aval.dtype == LOW[device]
