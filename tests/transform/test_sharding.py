"""On several devices autocast changes dtypes, and neither shardings nor results."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import sharding as programs
from constructs.derivatives import high_level
from constructs.sharding import grid, mesh, normal
from jax import P, lax
from jax.sharding import AxisType, NamedSharding
from jaxprs import dtypes, matmul_dtypes, traced
from processors import processor_with
from test_construct_matrix import LOW, TOLERANCE, cast, each_device, error

import jamp

NAMED = {construct.name: construct for construct in programs.CONSTRUCTS}
LEARNING_RATE = 0.1

# Where the rows of the data lie, the columns of the first weight and the rows of the
# second.
LAYOUTS = {
    "data_parallel": (P("i"), P(), P()),
    "tensor_parallel": (P(), P(None, "j"), P("j")),
    "both": (P("i"), P(None, "j"), P("j")),
    "weights_spread_over_all": (P("i"), P(("i", "j")), P(None, ("i", "j"))),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def mlp(x, weights):
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return hidden @ weights["out"]


def loss(weights, x, y):
    return jnp.mean((mlp(x, weights).astype(jnp.float32) - y) ** 2)


def data():
    weights = {
        "in": normal(16, 32, seed=1, scale=0.25),
        "out": normal(32, 8, seed=2, scale=0.2),
        "bias": normal(32, seed=3, scale=0.1),
    }
    return weights, normal(8, 16), normal(8, 8, seed=4)


def spread(layout, kind=AxisType.Auto):
    """The weights and data on 4x2 devices."""
    rows, columns, transposed = LAYOUTS[layout]
    bias = P(columns[1]) if len(columns) > 1 else P()
    specs = ({"in": columns, "out": transposed, "bias": bias}, rows, rows)
    return jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(grid(kind), spec)),
        data(),
        specs,
    )


def assert_placed_alike(actual, expected):
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for found, wanted in leaves:
        assert found.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
        assert jax.typeof(found).sharding == jax.typeof(wanted).sharding


def compiled(fn, *arguments):
    return jax.jit(fn).lower(*arguments).compile().as_text()


def collectives(text):
    """How many numbers each kind of collective of a compiled program gives."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    moved = Counter()
    for results, kind in re.findall(rf" = (\(.*?\)|\S+) ({kinds})\(", text):
        for sizes in re.findall(r"\[([\d,]*)\]", results):
            moved[kind] += math.prod(map(int, filter(None, sizes.split(","))))
    return moved


def test_other_placements_are_found():
    weights, x, _ = spread("both")
    assert_placed_alike(weights, weights)
    with pytest.raises(AssertionError):
        assert_placed_alike(x, jax.device_put(x, NamedSharding(grid(), P("j"))))


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["plain", "jit"])
@each_layout
def test_results_lie_where_the_plain_program_puts_them(layout, outside):
    weights, x, _ = spread(layout)
    actual = outside(cast(mlp, "gpu"))(x, weights)
    assert actual.dtype == jnp.float16
    assert_placed_alike(actual, outside(mlp)(x, weights))


@pytest.mark.parametrize("name", NAMED)
def test_a_construct_leaves_its_results_where_they_were(name):
    construct = NAMED[name]
    arguments = construct.arguments()
    actual = jax.jit(cast(construct.fn, "gpu"))(*arguments)
    assert_placed_alike(actual, jax.jit(construct.fn)(*arguments))


@each_layout
def test_gradients_lie_where_their_weights_do(layout):
    arguments = spread(layout)
    expected = jax.jit(jax.grad(loss))(*arguments)
    actual = jax.jit(jax.grad(cast(loss, "gpu")))(*arguments)
    assert dtypes(actual) == dtypes(expected)
    assert_placed_alike(actual, expected)


@pytest.mark.parametrize("fn", [loss, jax.grad(loss)], ids=["forward", "gradient"])
@each_layout
@each_device
def test_the_devices_talk_no_more_than_without_autocast(fn, layout, device):
    arguments = spread(layout)
    rewritten = cast(loss, device)
    rewritten = rewritten if fn is loss else jax.grad(rewritten)
    plain = collectives(compiled(fn, *arguments))
    assert plain
    assert collectives(compiled(rewritten, *arguments)) <= plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("processor", ["old", "avx512_bf16"])
def test_each_device_convolves_its_own_pictures(processor, kind, tmp_path):
    """It takes no patches of those of others."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    pictures = jax.device_put(normal(8, 5, 5, 8), NamedSharding(mesh, P("i")))
    weights = jax.device_put(normal(3, 3, 8, 256), NamedSharding(mesh, P()))

    def loss(weights, pictures):
        orders = ("NHWC", "HWIO", "NHWC")
        results = lax.conv_general_dilated(
            pictures, weights, (1, 1), "SAME", dimension_numbers=orders
        )
        return jnp.mean(results.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss)
    with processor_with(processor, tmp_path):
        text = compiled(jax.grad(cast(loss, "cpu")), weights, pictures)
    plain = collectives(compiled(gradient, weights, pictures))
    assert plain
    assert collectives(text) <= plain


@each_device
def test_each_device_casts_its_own_part_of_a_weight(device):
    weights, x, _ = spread("tensor_parallel")
    text = compiled(cast(mlp, device), x, weights)
    assert "[16,16]" in text
    assert "[16,32]" not in text
    assert not collectives(text)["all-gather"]


def step(weights, x, y, device=None):
    gradient = jax.grad(loss if device is None else cast(loss, device))(weights, x, y)
    return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, gradient)


def trained(arguments, device=None, steps=3):
    weights, x, y = arguments
    fn = jax.jit(step, static_argnums=3)
    for _ in range(steps):
        weights = fn(weights, x, y, device)
    return weights


@each_device
@each_layout
def test_training_gives_what_one_device_gives(layout, device):
    alone, spread_out = trained(data(), device), trained(spread(layout), device)
    assert dtypes(spread_out) == dtypes(alone)
    assert error(spread_out, alone) < TOLERANCE[device] / 4
    assert error(spread_out, trained(data())) < TOLERANCE[device]
    assert error(alone, data()[0]) > 10 * error(spread_out, alone)


@each_device
def test_data_parallel_training_in_a_shard_map(device):
    def local(weights, x, y):
        gradient = jax.grad(cast(loss, device))(weights, x, y)
        return jax.tree.map(lambda g: lax.pmean(g, "i"), gradient)

    weights, x, y = data()
    # The weights are made varying first, so that JAX itself does not sum gradients.
    fn = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(P(), P("i"), P("i")),
        out_specs=P(),
        check_vma=False,
    )
    actual = jax.jit(fn)(weights, x, y)
    assert dtypes(actual) == dtypes(weights)
    assert error(actual, jax.grad(loss)(weights, x, y)) < TOLERANCE[device]


@each_device
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_outside_autocast(device, check_vma):
    def body(x, w):
        return lax.psum(jnp.tanh(x @ w), "i") / 8

    def mapped(body):
        return jax.shard_map(
            body,
            mesh=mesh(),
            in_specs=(P("i"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )

    arguments = programs.rows()
    fn = jax.jit(mapped(cast(body, device)))
    assert set(matmul_dtypes(traced(fn, *arguments))) == {(LOW[device],) * 2}
    assert error(fn(*arguments), jax.jit(mapped(body))(*arguments)) < TOLERANCE[device]


@each_device
def test_pmap_outside_autocast(device):
    def body(x, w):
        return lax.pmean(jnp.tanh(x @ w), "i"), x @ w

    arguments = normal(8, 2, 4), normal(4, 4, seed=1)
    fn = jax.pmap(cast(body, device), "i", in_axes=(0, None))
    plain = jax.pmap(body, "i", in_axes=(0, None))
    actual, expected = fn(*arguments), plain(*arguments)
    assert dtypes(actual) == (LOW[device], LOW[device])
    assert error(actual, expected) < TOLERANCE[device]
    assert_placed_alike(actual, expected)


def in_the_mesh_around(x, w):
    x = jax.sharding.reshard(x, P("i"))
    y = jnp.tanh(jnp.matmul(x, w, out_sharding=P("i", "j")))
    gathered = jax.sharding.reshard(y, P("i", None))
    return jnp.einsum("ij,jk->ik", gathered, w, out_sharding=P("i", None))


def constrained_in_the_mesh_around(x, w):
    y = lax.with_sharding_constraint(x @ w, P("i", "j"))
    return lax.with_sharding_constraint(jnp.tanh(y), P(None, "j"))


def mapped_over_the_mesh_around(x, w):
    body = lambda x, w: lax.all_gather(x @ w, "j", axis=1, tiled=True)  # noqa: E731
    specs = (P("i"), P(None, "j"))
    return jax.shard_map(body, in_specs=specs, out_specs=P("i", None), check_vma=False)(
        x, w
    )


AROUND = {
    "explicit": (in_the_mesh_around, AxisType.Explicit),
    "auto": (constrained_in_the_mesh_around, AxisType.Auto),
    "shard_map": (mapped_over_the_mesh_around, AxisType.Auto),
}


@each_device
@pytest.mark.parametrize("name", AROUND)
def test_a_mesh_set_around_the_call(name, device):
    fn, kind = AROUND[name]
    arguments = programs.rows()
    with jax.set_mesh(grid(kind)):
        rewritten = cast(fn, device)
        program = traced(rewritten, *arguments)
        assert set(matmul_dtypes(program)) == {(LOW[device],) * 2}
        actual, expected = rewritten(*arguments), jax.jit(fn)(*arguments)
        assert error(actual, expected) < TOLERANCE[device]
        assert_placed_alike(jax.jit(rewritten)(*arguments), expected)


def test_shardings_in_types_reach_the_gradient():
    arguments = NAMED["explicit_out_sharding"].arguments()
    fn = cast(NAMED["explicit_out_sharding"].fn, "gpu")

    def total(arguments):
        return jnp.sum(fn(*arguments).astype(jnp.float32))

    assert_placed_alike(jax.jit(jax.grad(total))(arguments), arguments)


def broadcast_over_rows(x):
    spec = jax.typeof(x).sharding.spec
    return lax.broadcast(x * 2, (8,), out_sharding=P("i", *spec))


@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.jacrev])
def test_derivatives_inside_have_the_shardings_of_their_primals(derivative):
    def fn(x):
        return derivative(jax.jit(broadcast_over_rows))(x)

    with jax.set_mesh(grid(AxisType.Explicit)):
        x = jax.device_put(jnp.arange(8.0), P("j"))
        program, plain = traced(cast(fn, "gpu"), x), traced(fn, x)
        actual, expected = cast(fn, "gpu")(x), fn(x)
    for found in (program, plain):
        for call in (eqn for eqn in found.eqns if eqn.primitive.name == "jit"):
            taken = [var.aval.sharding for var in call.invars]
            assert taken == [aval.sharding for aval in call.params["jaxpr"].in_avals]
    np.testing.assert_array_equal(actual, expected)


def test_a_high_level_primitive_is_rewritten_on_an_explicit_mesh():
    specs, on = (
        {"in_specs": (P("i"), P()), "out_specs": P("i")},
        mesh(AxisType.Explicit),
    )
    fn = jax.shard_map(high_level, check_vma=False, **specs)
    x, w = programs.placed(on, P("i"), P())
    with jax.set_mesh(on):
        program = traced(cast(fn, "gpu"), x, w)
        actual, expected = jax.jit(cast(fn, "gpu"))(x, w), jax.jit(fn)(x, w)
    assert matmul_dtypes(program) == [("float16", "float16")]
    assert error(actual, expected) < TOLERANCE["gpu"]


def test_a_second_mesh_is_another_signature():
    fn = cast(lambda x, w: lax.with_sharding_constraint(x @ w, P("i")), "gpu")
    arguments = programs.rows()
    placed = []
    for on in (mesh(), grid()):
        with jax.set_mesh(on):
            placed.append(fn(*arguments).sharding.mesh.shape["i"])
    assert placed == [8, 4]


def test_a_disabled_region_keeps_shardings_in_types():
    arguments = NAMED["explicit_out_sharding"].arguments()

    def fn(x, w):
        with jamp.autocast(enabled=False):
            return jnp.tanh(x @ w)

    actual = cast(fn, "gpu")(*arguments)
    assert actual.dtype == jnp.float32
    expected = jnp.tanh(arguments[0] @ arguments[1])
    assert_placed_alike(actual, expected)
    np.testing.assert_array_equal(actual, expected)


def test_a_disabled_region_takes_16_bits_into_another_mesh():
    def fn(x, w):
        y = x @ w
        with jamp.autocast(enabled=False):
            return programs.through_explicit_axes(y, w)

    arguments = NAMED["explicit_axes"].arguments()
    actual = cast(fn, "gpu")(*arguments)
    assert actual.dtype == jnp.float32
    assert error(actual, fn(*arguments)) < TOLERANCE["gpu"]
