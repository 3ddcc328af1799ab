"""What is added up is added in float32, and rounded once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh
from devices import LOW, each_device
from jax import P, lax
from jaxprs import equations, traced
from rounded_once import TERMS, assert_rounded_once, in_16_bits, values

import jamp

SUMS = ("add_any", "cumsum", "cumprod", "psum", "psum_invariant", "reduce_scatter")
SUMS += ("reduce_sum", "reduce_window_sum", "scatter-add", "scatter-mul", "scatter-sub")
SUMS += ("select_and_scatter_add",)
GATHERS = ("all_gather", "all_gather_invariant")
ROWS = np.zeros(TERMS, int)


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


@pytest.mark.numbers
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
