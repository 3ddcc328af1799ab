"""Gradients of weights that multiply what a loop carries, made behind the loop back."""

import jax
import jax.numpy as jnp
import pytest
from compilations import Compilations
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations, traced
from lowerings.recurrent_loops import (
    LENGTH,
    LOOPS,
    ROWS,
    SIZE,
    arrays,
    assert_near,
    autocast,
    gated,
    gradients,
    products,
    recurrent,
)

from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

pytestmark = pytest.mark.usefixtures("amx")

# Before JAX 0.11.2 a stack for it alone, in float32, takes longer than it saves.
MADE_BEHIND = {*LOOPS} - ({"no slices"} if MOVES_BFLOAT16_AS_FLOAT32 else set())


@pytest.mark.parametrize("name", sorted(MADE_BEHIND))
def test_no_step_of_the_loop_back_makes_the_gradient_of_a_weight(name):
    inside, _ = products(traced(gradients(autocast(LOOPS[name])), *arrays()))
    assert inside and not [shape for shape in inside if min(shape) == SIZE]


@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_are_those_of_float32(name, jit):
    fn = LOOPS[name]
    assert_near(jit(gradients(autocast(fn)))(*arrays()), gradients(fn)(*arrays()))


@pytest.mark.numbers
@pytest.mark.parametrize("name", LOOPS)
def test_derivatives_along_a_direction_are_those_of_float32(name):
    def along(fn):
        def total(*args):
            return fn(*args).astype(jnp.float32).sum((0, 1))

        return lambda *args: [jax.jvp(total, args, args)[1]]

    found = jax.jit(along(autocast(LOOPS[name])))(*arrays())
    assert_near(found, along(LOOPS[name])(*arrays()))


@pytest.mark.once
@pytest.mark.parametrize("name", LOOPS)
def test_second_derivatives_are_those_of_float32(name):
    def along(fn):
        return lambda *args: jax.jvp(gradients(fn), args, args)[1]

    found = jax.jit(along(autocast(LOOPS[name])))(*arrays())
    assert_near(found, along(LOOPS[name])(*arrays()), most=4e-2)


@pytest.mark.numbers
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_of_a_stack_of_loops_are_those_of_each(name):
    w, *others = arrays()
    stack = jnp.stack([w, w / 2])
    fn = jax.jit(jax.vmap(gradients(autocast(LOOPS[name])), in_axes=(0, *[None] * 3)))
    found = fn(stack, *others)
    for at in range(2):
        wanted = gradients(LOOPS[name])(stack[at], *others)
        assert_near([array[at] for array in found], wanted)


STACKS = {
    "a product": 1,
    "a product and its bias": 1,
    "a product of both": 1,
    "a slice that is read elsewhere": 2,
}


@pytest.mark.parametrize("name, count", STACKS.items())
def test_the_loop_back_stacks_one_gradient_of_what_is_added_up(name, count):
    """That of a product, for its weight, is that of the slice that is added to it."""
    program = traced(gradients(autocast(LOOPS[name])), *arrays())
    *_, back = (e for e in equations(program) if e.primitive.name == "scan")
    stacks = [v for v in back.outvars if v.aval.shape == (LENGTH, ROWS, SIZE)]
    assert len(stacks) == count


def test_a_weight_that_is_not_trained_has_no_product_behind_the_loop():
    fn, args = autocast(LOOPS["a gate"]), arrays()
    every, first, none = (
        products(traced(gradients(fn, argnums), *args))[1]
        for argnums in ((0, 1, 3), (0, 3), (3,))
    )
    assert [len(every), len(first), len(none)] == [2, 1, 0]


def test_a_slice_that_has_no_gradient_gets_none_for_the_weight():
    """In float32 it would take more than what is there for the weight alone."""
    if MOVES_BFLOAT16_AS_FLOAT32:
        pytest.skip("stacks are float32 there")
    program = traced(gradients(autocast(LOOPS["a product"]), 0), *arrays())
    *_, back = (e for e in equations(program) if e.primitive.name == "scan")
    (stack,) = [v.aval for v in back.outvars if v.aval.shape == (LENGTH, ROWS, SIZE)]
    assert stack.dtype == jnp.bfloat16


def test_weights_in_16_bits_have_gradients_in_16_bits():
    w, *others = arrays()
    low = w.astype(jnp.bfloat16)
    fn = gradients(autocast(LOOPS["a product"]), 0)
    found = jax.jit(fn)(low, *others)
    assert found.dtype == jnp.bfloat16
    wanted = gradients(LOOPS["a product"], 0)(low.astype(jnp.float32), *others)
    assert_near([found.astype(jnp.float32)], [wanted])


def test_a_checkpoint_around_the_loop_has_its_gradients():
    fn = LOOPS["a gate"]
    found = jax.jit(gradients(jax.checkpoint(autocast(fn))))(*arrays())
    again = jax.jit(gradients(autocast(jax.checkpoint(fn))))(*arrays())
    assert_near(found, gradients(fn)(*arrays()))
    assert_near(again, gradients(fn)(*arrays()))


def test_a_loop_of_unknown_length_can_be_exported_with_its_gradients():
    *weights, xs = arrays()
    (length,) = export.symbolic_shape("n")
    avals = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
    avals.append(jax.ShapeDtypeStruct((length, *xs.shape[1:]), xs.dtype))
    fn = jax.jit(gradients(autocast(LOOPS["a gate"])))
    found = export.export(fn)(*avals).call(*weights, xs)
    assert_near(found, gradients(LOOPS["a gate"])(*weights, xs))


@pytest.mark.parametrize("name", ["a product", "a gate"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_a_loop_have_its_gradients(name, check_vma):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    whole, parts = PartitionSpec(), PartitionSpec(None, "data")

    def sharded(fn):
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(whole, whole, whole, parts),
            out_specs=parts,
            check_vma=check_vma,
        )

    fn = LOOPS[name]
    found = jax.jit(gradients(autocast(sharded(fn))))(*arrays())
    assert_near(found, gradients(fn)(*arrays()))


def from_start(of_state):
    def loop(w, u, b, xs, start):
        def step(state, x):
            return of_state(state, w, u, b, x), None

        return lax.scan(step, start, xs)[0]

    return loop


SPREAD = {
    "a product": from_start(lambda h, w, u, b, x: jnp.tanh(x + h @ w)),
    "a product of both": from_start(lambda h, w, u, b, x: jnp.tanh(x @ u + h @ w)),
    "a gate": from_start(gated),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("slices", [None, "data"])
def test_a_loop_of_arrays_that_are_spread_explicitly_has_its_gradients(name, slices):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    fn, (*weights, xs) = SPREAD[name], arrays()
    wanted = gradients(fn)(*weights, xs, xs[0])
    with jax.set_mesh(mesh):
        start = jax.device_put(xs[0], PartitionSpec("data"))
        xs = jax.device_put(xs, PartitionSpec(None, slices))
        found = jax.jit(gradients(autocast(fn)))(*weights, xs, start)
    assert_near(found, wanted)


@pytest.mark.parametrize("name", ["a product", "a gate", "flax's LSTM"])
def test_eager_gradients_of_a_jitted_loop_compile_nothing_again(name):
    compilations, fn = Compilations(), gradients(autocast(jax.jit(LOOPS[name])))
    fn(*arrays())
    before = compilations.count
    fn(*arrays())
    assert compilations.count == before


def test_a_loop_that_is_linear_but_for_a_clock_can_be_transposed():
    w, *_, xs = arrays()

    def loop(x):
        def step(carried, _):
            time, state = carried
            return (time + 0.1, state + jnp.sin(time) * (state @ w)), None

        return lax.scan(step, (0.0, x), None, length=LENGTH)[0][1]

    ones = jnp.ones_like(xs[0])
    (wanted,) = jax.linear_transpose(loop, xs[0])(ones)
    (found,) = jax.linear_transpose(autocast(loop), xs[0])(ones)
    assert_near([found], [wanted])


def test_what_several_weights_multiply_is_stacked_once():
    def gates(h, w, u, b, x):
        return jnp.tanh(x + h @ w) * jax.nn.sigmoid(x + h @ u)

    program = traced(gradients(autocast(recurrent(gates))), *arrays())
    behind = [e for e in equations(program) if e.primitive.name == "dot_general"]
    multiplied = {
        e.invars[0] for e in behind if e.outvars[0].aval.shape == (SIZE, SIZE)
    }
    assert len(multiplied) == 1


def test_a_product_much_larger_than_what_the_loop_carries_has_its_gradient_inside():
    """Those of all steps would take the most memory of the program."""
    w, _, _, xs = arrays()
    wide = jnp.tile(w, 16)

    def loop(wide, xs):
        def step(state, x):
            return state + jnp.tanh(state @ wide) @ wide.T + x, None

        return lax.scan(step, xs[0], xs)[0]

    inside, _ = products(traced(gradients(autocast(loop), (0, 1)), wide, xs))
    assert (SIZE, 16 * SIZE) in inside


def test_an_eager_gradient_compiles_no_more_again_than_as_written():
    compilations, counts = Compilations(), []
    for fn in (LOOPS["a gate"], autocast(LOOPS["a gate"])):
        for _ in range(2):
            before = compilations.count
            gradients(fn)(*arrays())
        counts.append(compilations.count - before)
    assert counts[1] <= counts[0]


def test_a_step_may_add_ever_so_often_to_a_product():
    def added(h, w, u, b, x):
        total = x + h @ w
        for _ in range(1000):
            total = total + h
        return jnp.tanh(total)

    inside, _ = products(traced(gradients(autocast(recurrent(added))), *arrays()))
    assert inside and not [shape for shape in inside if min(shape) == SIZE]


def test_a_row_that_is_added_to_all_rows_has_its_gradient():
    w, *_, xs = arrays()

    def loop(w, rows):
        def step(h, row):
            return jnp.tanh(lax.add(row, h @ w)), None

        return lax.scan(step, jnp.zeros((ROWS, SIZE)), rows)[0]

    def of(fn):
        return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), (0, 1))

    found = jax.jit(of(autocast(loop)))(w, xs[:, :1])
    assert_near(found, of(loop)(w, xs[:, :1]))
