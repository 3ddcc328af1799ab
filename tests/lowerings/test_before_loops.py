"""Products of what comes into a loop, made before it on CPUs that gain by it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from jax import export, lax
from jaxprs import equations, primitives, traced
from recurrent_loops import assert_near

import jamp

pytestmark = pytest.mark.usefixtures("amx")

LENGTH, SIZE = 6, 64
# Of one row, also where no gradient is taken; of a few, where one is.
ONE, FEW = 1, 8

autocast = functools.partial(jamp.autocast, device_type="cpu", dtype=jnp.bfloat16)


def arrays(rows=ONE, features=2 * SIZE):
    rng = np.random.default_rng(0)
    shapes = [(SIZE, features), (SIZE, features), (features,), (LENGTH, rows, SIZE)]
    return [jnp.float32(0.1 * rng.standard_normal(shape)) for shape in shapes]


def gated(product):
    """The next state from the sum of both products."""
    gate, new = jnp.split(product, 2, axis=-1)
    return jax.nn.sigmoid(gate) * jnp.tanh(new)


def recurrent(of_slice, *, options=None, around=lambda step: step):
    """A loop over slices whose states go through `gated`."""

    def loop(inner, outer, bias, xs):
        @around
        def step(state, x):
            state = gated(of_slice(x, inner, bias) + state @ outer)
            return state, state

        return lax.scan(step, jnp.zeros(xs.shape[1:]), xs, **(options or {}))

    return loop


RECURRENT = {
    "a product": recurrent(lambda x, w, b: x @ w),
    "a product and its bias": recurrent(lambda x, w, b: x @ w + b),
    "a matrix made in the loop": recurrent(lambda x, w, b: x @ jnp.tanh(w)),
    "joined matrices": recurrent(
        lambda x, w, b: x @ jnp.concatenate(jnp.split(w, 2, axis=-1), axis=-1)
    ),
    "slices that are moved": recurrent(lambda x, w, b: (w.T @ x.T).T + b),
    "backwards": recurrent(lambda x, w, b: x @ w + b, options={"reverse": True}),
    "unrolled": recurrent(lambda x, w, b: x @ w + b, options={"unroll": 2}),
}


def products_in_loops(fn, *args):
    """How many products a program has in all, and in its loops."""
    program = traced(fn, *args)
    loops = [e for e in equations(program) if e.primitive.name == "scan"]
    inside = [primitives(loop.params["jaxpr"])["dot_general"] for loop in loops]
    return primitives(program)["dot_general"], sum(inside)


@pytest.mark.parametrize("name", RECURRENT)
def test_products_of_what_comes_in_are_made_before_the_loop(name):
    assert products_in_loops(autocast(RECURRENT[name]), *arrays()) == (2, 1)


@pytest.mark.parametrize("name", RECURRENT)
def test_of_few_rows_they_are_made_so_for_gradients_alone(name):
    fn, args = RECURRENT[name], arrays(FEW)
    assert products_in_loops(autocast(fn), *args) == (2, 2)
    in_all, in_loops = products_in_loops(gradients(autocast(fn)), *args)
    # The loop back has the gradient of the state, and no more.
    assert (in_all, in_loops) == (6, 2)


@pytest.mark.parametrize("name", RECURRENT)
def test_the_loop_gives_what_it_gave(name, choose_processor):
    found = jax.jit(autocast(RECURRENT[name]))(*arrays())
    choose_processor("old")
    fn = autocast(RECURRENT[name])
    assert products_in_loops(fn, *arrays()) == (2, 2)
    for one, other in zip(found, jax.jit(fn)(*arrays()), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


def gradients(fn):
    def loss(*args):
        final, stacked = fn(*args)
        return (final**2).sum() + jnp.sin(stacked).sum()

    return jax.grad(loss, argnums=(0, 1, 2, 3))


@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["compiled", "eager"])
@pytest.mark.parametrize("rows", [ONE, FEW])
@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_are_those_of_float32(name, rows, jit):
    fn, args = RECURRENT[name], arrays(rows)
    assert_near(jit(gradients(autocast(fn)))(*args), gradients(fn)(*args))


@pytest.mark.parametrize("rows", [ONE, FEW])
def test_second_derivatives_are_those_of_float32(rows):
    def along(fn):
        return lambda *args: jax.jvp(gradients(fn), args, args)[1]

    fn, args = RECURRENT["a product and its bias"], arrays(rows)
    found = jax.jit(along(autocast(fn)))(*args)
    assert_near(found, along(fn)(*args), most=4e-2)


def test_a_stack_of_loops_is_one_loop():
    inner, outer, bias, xs = arrays()
    stack = jnp.stack([xs, 2 * xs])
    fn = autocast(RECURRENT["a product and its bias"])
    found = jax.vmap(fn, in_axes=(None, None, None, 0))(inner, outer, bias, stack)
    for at in range(2):
        one = fn(inner, outer, bias, stack[at])
        jax.tree.map(
            lambda a, b, at=at: np.testing.assert_allclose(a[at], b, atol=2e-2),
            found,
            one,
        )


def test_a_loop_of_unknown_length_can_be_exported():
    *weights, xs = arrays()
    (length,) = export.symbolic_shape("n")
    avals = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
    avals.append(jax.ShapeDtypeStruct((length, *xs.shape[1:]), xs.dtype))
    fn = jax.jit(autocast(RECURRENT["a product and its bias"]))
    exported = export.export(fn)(*avals)
    _, found = exported.call(*weights, xs)
    np.testing.assert_allclose(found, fn(*weights, xs)[1], atol=1e-2)


def test_a_loop_that_is_linear_can_be_transposed():
    inner, outer, _, xs = arrays(FEW, SIZE)

    def loop(xs):
        start = jnp.zeros(xs.shape[1:])
        return lax.scan(lambda h, x: (h @ outer + x @ inner, None), start, xs)[0]

    ones = jnp.ones_like(xs[0])
    (wanted,) = jax.linear_transpose(loop, xs)(ones)
    (found,) = jax.linear_transpose(autocast(loop), xs)(ones.astype(jnp.bfloat16))
    assert_near([found], [wanted])


def test_an_eager_gradient_compiles_no_more_again_than_as_written():
    compilations, counts = Compilations(), []
    for fn in (RECURRENT["a product"], autocast(RECURRENT["a product"])):
        for _ in range(2):
            before = compilations.count
            gradients(fn)(*arrays(FEW))
        counts.append(compilations.count - before)
    assert counts[1] <= counts[0]


def over_microbatches(inner, outer, bias, xs):
    """A sum over batches of the losses of a network, which has one at a time."""

    def step(total, x):
        h = jax.nn.relu(x @ inner + bias)[:, :SIZE] @ outer
        return total + (h**2).sum(), None

    return lax.scan(step, 0.0, xs)


def mapped(inner, outer, bias, xs):
    return lax.map(lambda x: x @ inner + bias, xs)


def printed(inner, outer, bias, xs):
    def step(state, x):
        jax.debug.print("{}", x.sum())
        state = gated(x @ inner + state @ outer)
        return state, None

    return lax.scan(step, xs[0], xs)


OTHERS = {
    "batches of which one is there at a time": (over_microbatches, arrays(), 2),
    "a map": (mapped, arrays(), 1),
    "many rows": (recurrent(lambda x, w, b: x @ w), arrays(65), 2),
    "a checkpoint": (
        recurrent(lambda x, w, b: x @ w, around=jax.checkpoint),
        arrays(),
        2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_have_their_products(name):
    fn, args, count = OTHERS[name]
    assert products_in_loops(autocast(fn), *args) == (count, count)


def test_what_would_need_much_memory_stays_in_the_loop():
    """More than four numbers for each that comes in."""

    def loop(inner, outer, bias, xs):
        def step(state, x):
            product = x @ inner + state @ outer
            return product.reshape(ONE, SIZE, -1).max(-1), None

        return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)

    fits, larger = (arrays(ONE, n * SIZE) for n in (4, 5))
    assert products_in_loops(autocast(loop), *fits) == (2, 1)
    assert products_in_loops(autocast(loop), *larger) == (2, 2)


def test_a_loop_that_prints_has_its_products(capfd):
    fn = jax.jit(autocast(printed))
    *_, xs = args = arrays()
    assert products_in_loops(fn, *args) == (2, 2)
    jax.block_until_ready(fn(*args))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split()
    np.testing.assert_allclose([*map(float, lines)], xs.sum((1, 2)), rtol=1e-4)


def test_the_report_has_products_where_they_stand_in_the_code():
    report = jamp.explain(RECURRENT["a product"], device_type="cpu")(*arrays())
    found = [op.times for op in report.operations if op.entry == "dot_general"]
    assert found == [LENGTH, LENGTH]
