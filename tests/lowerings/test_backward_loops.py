"""Loops back of gradients that are taken inside autocast: products behind them."""

import jax
import jax.numpy as jnp
import pytest
from jax import P, export, lax
from jax.sharding import AxisType
from jaxprs import equations, traced
from lowerings.recurrent_loops import (
    LENGTH,
    LOOPS,
    ROWS,
    SIZE,
    arrays,
    assert_near,
    autocast,
    gradients,
    products,
    recurrent,
)

pytestmark = pytest.mark.usefixtures("amx")


def inside(fn):
    """Its gradients, taken inside autocast, in float32."""
    found = autocast(gradients(fn))
    return lambda *args: [array.astype(jnp.float32) for array in found(*args)]


# Where more is added to the gradient of a weight, it is added up in the loop.
ADDED_IN_THE_LOOP = {
    "a weight made in the loop",
    "a weight that is read elsewhere",
    "one weight twice",
}


def matrices(fn, *args):
    """The products as large as a weight in loops, and how many outside."""
    inner, outer = products(traced(fn, *args))
    made = [
        [shape for shape in shapes if min(shape) == SIZE] for shapes in (inner, outer)
    ]
    return tuple(map(len, made))


@pytest.mark.parametrize("name", sorted({*LOOPS} - ADDED_IN_THE_LOOP))
def test_no_step_of_the_loop_back_makes_the_gradient_of_a_weight(name):
    inner, outer = matrices(inside(LOOPS[name]), *arrays())
    assert inner == 0 < outer


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_are_those_of_float32(name):
    fn = LOOPS[name]
    assert_near(jax.jit(inside(fn))(*arrays()), gradients(fn)(*arrays()))


@pytest.mark.once
@pytest.mark.parametrize("name", LOOPS)
def test_second_derivatives_are_those_of_float32(name):
    def along(gradients):
        return lambda *args: jax.jvp(gradients, args, args)[1]

    found = jax.jit(along(inside(LOOPS[name])))(*arrays())
    assert_near(found, along(gradients(LOOPS[name]))(*arrays()), most=4e-2)


@pytest.mark.numbers
@pytest.mark.parametrize("name", ["a product of both", "a gate", "flax's LSTM"])
def test_gradients_of_a_stack_of_loops_are_those_of_each(name):
    w, *others = arrays()
    stack = jnp.stack([w, w / 2])

    def of_stack(stack, *others):
        return jax.vmap(gradients(LOOPS[name]), (0, *[None] * 3))(stack, *others)

    found = jax.jit(autocast(of_stack))(stack, *others)
    wanted = of_stack(stack, *others)
    assert_near([array.astype(jnp.float32) for array in found], wanted)


def test_an_eager_gradient_is_that_of_a_compiled_one():
    fn = inside(LOOPS["flax's GRU"])
    assert_near(fn(*arrays()), jax.jit(fn)(*arrays()), most=1e-2)


def test_what_is_handed_on_to_the_slices_is_one_product():
    _, outer = products(traced(inside(LOOPS["a product of both"]), *arrays()))
    assert (LENGTH, ROWS, SIZE) in outer


def test_equal_factors_are_stacked_once():
    """Two products of Flax's LSTM have one cotangent, which JAX makes twice."""
    program = traced(inside(LOOPS["flax's LSTM"]), *arrays())
    *_, back = (e for e in equations(program) if e.primitive.name == "scan")
    stacks = [v for v in back.outvars if v.aval.shape == (LENGTH, ROWS, 4 * SIZE)]
    assert len(stacks) == 1


def test_gradients_that_a_loop_accumulates_take_no_more_memory():
    """Loops forth that add up are there to have less in memory at a time."""

    def accumulated(w, u, b, xs):
        def step(total, x):
            def loss(w, u):
                return jnp.sin(jnp.tanh(x @ w) @ u).sum()

            return jax.tree.map(jnp.add, total, jax.grad(loss, (0, 1))(w, u)), None

        return lax.scan(step, (0 * w, 0 * u), xs)[0]

    inner, outer = matrices(autocast(accumulated), *arrays())
    assert (inner, outer) == (2, 0)


def test_products_of_one_row_are_one_product_in_float32():
    """Each adds nothing up, and is elementwise."""
    w, u, b, xs = arrays()
    fn, args = LOOPS["a product of both"], (w, u, b, xs[:, :1])
    assert matrices(inside(fn), *args) == (0, 2)
    assert_near(jax.jit(inside(fn))(*args), gradients(fn)(*args))


def test_a_loop_of_many_rows_adds_up_step_by_step():
    w, u, b, xs = arrays()
    rows = jnp.tile(xs, (1, 32, 1))
    inner, outer = matrices(inside(LOOPS["a product"]), w, u, b, rows)
    assert inner > 0 == outer


def test_a_loop_that_stacks_nothing_else_does_so_for_large_gains_alone():
    """Its stacks would be most of its memory."""
    w, u, b, xs = arrays()
    xs = jnp.tile(xs, (1, 2, 1))

    def of_weights(fn):
        return autocast(gradients(fn, (0, 1)))

    one, two = LOOPS["a product"], LOOPS["a product of both"]
    assert matrices(of_weights(one), w, u, b, xs) == (1, 0)
    assert matrices(of_weights(two), w, u, b, xs) == (0, 2)
    assert matrices(inside(one), w, u, b, xs) == (0, 1)


def test_a_loop_of_unknown_length_can_be_exported():
    *weights, xs = arrays()
    (length,) = export.symbolic_shape("n")
    avals = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
    avals.append(jax.ShapeDtypeStruct((length, *xs.shape[1:]), xs.dtype))
    fn = jax.jit(inside(LOOPS["a product of both"]))
    found = export.export(fn)(*avals).call(*weights, xs)
    assert_near(found, gradients(LOOPS["a product of both"])(*weights, xs))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_a_loop_have_its_gradients(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        LOOPS["a product of both"],
        mesh=mesh,
        in_specs=(P(), P(), P(), P(None, "data")),
        out_specs=P(None, "data"),
        check_vma=check_vma,
    )
    found = jax.jit(inside(sharded))(*arrays())
    assert_near(found, gradients(LOOPS["a product of both"])(*arrays()))


def test_a_loop_of_arrays_that_are_spread_explicitly_has_its_gradients():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    *weights, xs = arrays()

    def fn(w, u, b, xs):
        return lax.scan(lambda h, x: (jnp.tanh(x @ u + h @ w), None), xs[0], xs)[0]

    wanted = gradients(fn)(*weights, xs)
    with jax.set_mesh(mesh):
        found = jax.jit(inside(fn))(*weights, jax.device_put(xs, P(None, "data")))
    assert_near(found, wanted)


def reversed_often(array):
    for _ in range(1000):
        array = array[::-1]
    return array


MOVED_OFTEN = {
    "slices": lambda h, w, u, b, x: jnp.tanh(reversed_often(x) @ u + h @ w),
    "a weight": lambda h, w, u, b, x: jnp.tanh(x @ u + h @ reversed_often(w)),
    "a product": lambda h, w, u, b, x: jnp.tanh(x @ u + reversed_often(h @ w)),
}


@pytest.mark.parametrize("name", MOVED_OFTEN)
def test_what_is_multiplied_may_be_moved_ever_so_often(name):
    inner, outer = matrices(inside(recurrent(MOVED_OFTEN[name])), *arrays())
    assert inner == 0 < outer
