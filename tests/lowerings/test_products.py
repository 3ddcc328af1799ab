"""Matrix products of jamp's own, as they are bound under autocast, against JAX's."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P, lax
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads
from jaxprs import equations, matmul_dtypes, traced
from processors import processor_with
from products import (
    assert_equal_derivatives,
    cast,
    einsum_of,
    integers,
    operands_of_product,
)

import jamp
from jamp.__main__ import main
from jamp._lowerings.bilinear import product_params
from jamp._lowerings.product import product_p
from jamp._lowerings.releases import ROUNDS_PRODUCTS

W, X = (jax.device_put(np.ones(shape, np.float32)) for shape in ((3, 4), (5, 3)))


@st.composite
def layouts(draw):
    """Two shapes and the dimension numbers of a product of arrays of these."""
    kinds = {k: draw(st.integers(0, 3)) for k in ("batch", "left", "right", "summed")}
    dims = {k: [(k, i) for i in range(n)] for k, n in kinds.items()}
    lhs = draw(st.permutations(dims["batch"] + dims["left"] + dims["summed"]))
    rhs = draw(st.permutations(dims["batch"] + dims["right"] + dims["summed"]))
    sizes = {d: draw(st.sampled_from([0, 1, 1, 2, 3, 5])) for d in {*lhs, *rhs}}
    shared = [draw(st.permutations(dims[kind])) for kind in ("summed", "batch")]
    numbers = tuple(
        (tuple(map(lhs.index, some)), tuple(map(rhs.index, some))) for some in shared
    )
    return tuple(sizes[d] for d in lhs), tuple(sizes[d] for d in rhs), numbers


@pytest.mark.usefixtures("on_processor")
@settings(max_examples=12)
@given(layouts())
def test_products_of_every_layout_and_their_derivatives(layout):
    *shapes, numbers = layout
    x, y = (jax.device_put(integers(i, shape)) for i, shape in enumerate(shapes))
    assert_equal_derivatives(
        functools.partial(lax.dot_general, dimension_numbers=numbers), x, y
    )


MATRICES = {
    "attention": ((2, 3, 2, 4), (2, 5, 2, 4), (((3,), (3,)), ((0, 2), (0, 2)))),
    "both transposed": ((3, 2), (4, 3), (((0,), (1,)), ((), ()))),
    "a weight's gradient": ((2, 3, 4), (2, 3, 5), (((0, 1), (0, 1)), ((), ()))),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("modes", ["fwd", "rev"])
def test_derivatives_to_second_order_agree_with_finite_differences(name, modes):
    """In float64: 16 bits are too few for differences."""
    left, right, numbers = MATRICES[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, y = (jax.device_put(rng.standard_normal(shape)) for shape in (left, right))
        program = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, numbers))(x, y)
        params = product_params(program.eqns[0].params, x.dtype)
        product = functools.partial(product_p.bind, **params)
        check_grads(product, (x, y), order=2, modes=modes)


@pytest.mark.usefixtures("on_processor")
def test_a_product_of_what_xla_transposes_runs():
    """XLA computes cumsum along the first dimension from a transposed array."""
    x, w = jnp.asarray(integers(0, (512, 4))), jnp.asarray(integers(1, (4, 4)))

    def fn(w, x):
        return jnp.sum(jnp.cumsum(x @ w, 0) / 512)

    found, expected = (jax.jit(jax.grad(f, argnums=1))(w, x) for f in (cast(fn), fn))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("on_processor")
def test_a_gradient_that_is_transposed_runs():
    """XLA would make it a product that cannot run of operands that are swapped."""
    x, w = jnp.asarray(integers(0, (64, 32))), jnp.asarray(integers(1, (16, 32)))
    weights = jax.jit(jax.grad(cast(lambda w, x: jnp.sum(x @ w.T))))(w, x)
    np.testing.assert_array_equal(weights, jnp.broadcast_to(x.sum(0), w.shape))


def test_a_transpose_behind_leaves_a_product_in_the_layout_with_instructions(tmp_path):
    """XLA would swap the operands to swallow it."""
    x, w = jnp.ones((16, 32)), jnp.ones((32, 64))
    with processor_with("avx512_bf16", tmp_path):
        fn = jax.jit(lambda w, x: cast(jnp.matmul)(x, w).T)
        compiled = fn.lower(w, x).compile().as_text()
    assert re.findall(r"lhs_contracting_dims=(\S+),", compiled) == ["{1}"]


OF_TRANSPOSES = {
    "the right one": lambda w, x: x @ w.T,
    "the left one": lambda w, x: x.T @ w,
    "both": lambda w, x: w.T @ x.T,
    "in a function": lambda w, x: x @ jax.jit(jnp.transpose)(w),
    "scaled": lambda w, x: x @ (w.T * 3),
    "with itself": lambda w, x: (x @ w) @ (x @ w).T,
    "batched": jax.vmap(lambda w, x: w.T @ x, (None, 0)),
    "whose gradient is transposed": lambda w, x: jnp.einsum(
        "bhqk,bkhd->bqhd", w.reshape(8, 4, 32, 64), x.reshape(8, 64, 4, 32)
    ),
}


@pytest.mark.parametrize("name", OF_TRANSPOSES)
def test_a_product_of_transposes_is_multiplied_as_others_are(name, tmp_path):
    """XLA would take them to lie in memory as they did, and multiply in float32."""

    def multiplied(fn):
        def loss(w, x):
            return jnp.sum(jnp.sin(cast(fn)(w, x).astype(jnp.float32)))

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
        text = gradients.lower(*[jnp.ones((256, 256))] * 2).compile().as_text()
        dtypes = dict(re.findall(r"(%[\w.]+) = (\w+)\[", text))
        return {dtypes[name] for name in re.findall(r" dot\((%[\w.]+), ", text)}

    with processor_with("amx_bf16", tmp_path):
        found, expected = map(multiplied, (OF_TRANSPOSES[name], lambda w, x: x @ w))
    assert found == expected != set()


# What XLA is given of stacks of matrices, of which it would transpose some.
STACKS = {
    "attention's values": (
        ((2, 5, 3, 4), (2, 3, 8, 5), ((1,), (3,)), ((0, 2), (0, 1))),
        ["2x3x8x5", "2x5x3x4"],
    ),
    "the gradient of its keys": (
        ((2, 3, 8, 64), (2, 8, 3, 4), ((2,), (1,)), ((0, 1), (0, 2))),
        ["2x8x3x4", "2x3x8x64"],
    ),
    "a result that is larger than its operands": (
        ((2, 3, 4, 16), (2, 16, 3, 4), ((2,), (3,)), ((0, 1), (0, 2))),
        ["2x3x4x16", "2x16x3x4"],
    ),
}


@pytest.mark.parametrize("processor", ["old", "avx512_bf16"])
@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_multiplied_in_the_order_that_moves_fewer_numbers(
    name, processor, tmp_path
):
    (left, right, *numbers), operands = STACKS[name]
    x, y = (jax.device_put(integers(i, shape)) for i, shape in enumerate((left, right)))
    low = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    fn = functools.partial(lax.dot_general, dimension_numbers=tuple(numbers))
    with processor_with(processor, tmp_path):
        taken = operands_of_product(cast(fn), *low)
        assert re.findall(r"([\dx]+?)x[bf]", taken) == operands
        assert_equal_derivatives(fn, x, y)


# Of single matrices XLA transposes the left one for instructions, the right one never.
ALONE = {
    "a larger left one": ("ka,kb->ab", (64, 32), (64, 8), ["64x8", "64x32"]),
    "a smaller left one": ("ka,kb->ab", (64, 8), (64, 32), ["64x8", "64x32"]),
    "a larger result": ("ka,kb->ab", (8, 32), (8, 16), ["8x32", "8x16"]),
    "rows": ("ak,bk->ab", (64, 8), (32, 8), ["64x8", "32x8"]),
    "several summed": ("mna,mnb->ab", (8, 8, 32), (8, 8, 4), ["8x8x4", "8x8x32"]),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_smaller_of_two_matrices_is_transposed(name, tmp_path):
    *product, operands = ALONE[name]
    fn, x, y, low = einsum_of(*product)
    with processor_with("amx_bf16", tmp_path):
        taken = operands_of_product(cast(fn), *low)
        assert re.findall(r"([\dx]+?)xbf", taken) == operands
        assert_equal_derivatives(fn, x, y)


@pytest.mark.parametrize("processor", ["amx_bf16", "avx512_bf16"])
@pytest.mark.parametrize(
    "subscripts", ["nhd,hde->nhe", "hqk,khd->qhd", "hab,hbc->cha", "hab,hbc->ahc"]
)
def test_stacks_of_small_matrices_are_multiplied_in_any_layout(
    subscripts, processor, tmp_path
):
    """JAX up to 0.11.0 ended the process."""
    sizes = dict.fromkeys("abcdehkqn", 3) | {"h": 2}
    given = subscripts.partition("->")[0].split(",")
    x, y = (integers(i, [sizes[d] for d in dims]) for i, dims in enumerate(given))
    fn = functools.partial(jnp.einsum, subscripts)
    with processor_with(processor, tmp_path):
        assert_equal_derivatives(fn, jnp.asarray(x), jnp.asarray(y))


ROUNDED_WITH_AMX = {
    "small": ((64, 256, 1024), False),
    "much is added up": ((512, 1024, 1024), False),
    "little is added up": ((2048, 256, 1024), True),
    "a vocabulary": ((1024, 384, 4096), True),
}


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("name", ROUNDED_WITH_AMX)
def test_xla_rounds_products_where_that_takes_less_time_or_memory(name):
    (rows, added, columns), rounded = ROUNDED_WITH_AMX[name]
    x, w = jnp.ones((rows, added)), jnp.ones((added, columns))
    lowered = jax.jit(cast(jnp.matmul)).lower(x, w).as_text()
    (found,) = re.findall(r"dot_general .*-> tensor<\d+x\d+x(\w+)>", lowered)
    assert found == ("bf16" if rounded and ROUNDS_PRODUCTS else "f32")


def gradient_of(fn):
    return jax.grad(lambda w, x: jnp.sum(fn(x, w).astype(jnp.float32)))


def dense(x, w):
    return nn.Dense(1, use_bias=False).apply({"params": {"kernel": w}}, x)


def with_a_view(x, w):
    return x @ w.T.reshape(1, 2).T


def with_several_in_one(x, w):
    return x @ jnp.concatenate([w[:1], w[1:]])


def with_one_of_several(x, w):
    return x @ jnp.split(jnp.stack([w, w], 1).reshape(2, 2), 2, axis=1)[0]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "product",
    [jnp.matmul, dense, with_a_view, with_several_in_one, with_one_of_several],
)
def test_the_gradient_of_a_weight_is_never_rounded_to_16_bits(product, device):
    fn = gradient_of(jamp.autocast(product, device_type=device))
    # 1 + 2^-9 fits into float32 alone.
    x = jnp.full((513, 2), 2.0**-9)
    gradient = jax.jit(fn)(jnp.ones((2, 1)), x)
    np.testing.assert_array_equal(gradient, jnp.full((2, 1), 513 * 2.0**-9))
    program = traced(fn, jnp.ones((2, 1)), x)
    (last,) = [e for e in equations(program) if e.primitive.name == "dot_general"][-1:]
    assert last.outvars[0].aval.dtype == jnp.float32
    low = "float16" if device == "gpu" else "bfloat16"
    assert set(matmul_dtypes(program)) == {(low, low)}


def test_a_policy_may_round_the_gradients_of_weights(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "gpu"\nfloat32_gradients = false\n', encoding="utf-8")
    fn = gradient_of(jamp.autocast(jnp.matmul, policy=jamp.Policy.load(file)))
    program = traced(fn, jnp.ones((2, 1)), jnp.ones((3, 2)))
    (last,) = [e for e in equations(program) if e.primitive.name == "dot_general"][-1:]
    assert last.outvars[0].aval.dtype == jnp.float16
    assert main(["policy", "gpu", "--diff", str(file)]) == 1
    assert capsys.readouterr().out == "gradients of weights: float32 -> 16 bits\n"


@pytest.mark.parametrize("processor", ["old", "avx512_bf16"])
def test_the_gradient_of_a_weight_is_that_of_float32_on_several_devices(
    processor, tmp_path
):
    x, w = jnp.asarray(integers(0, (2, 5, 3))), jnp.asarray(integers(1, (2, 3, 4)))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spread = jax.device_put((w, x), NamedSharding(mesh, P("i")))
    with processor_with(processor, tmp_path):
        found = jax.jit(gradient_of(cast(jnp.matmul)))(*spread)
    np.testing.assert_array_equal(found, gradient_of(jnp.matmul)(w, x))


def test_the_gradient_of_a_weight_that_a_loop_reads_is_not_either():
    def repeated(x, w):
        return lax.scan(lambda c, row: (c, row @ w), 0.0, x)[1]

    found = gradient_of(cast(repeated))(W, X[None])
    np.testing.assert_array_equal(found, gradient_of(repeated)(W, X[None]))


POLICIES = {
    "dots_saveable": (jax.checkpoint_policies.dots_saveable, 0),
    "dots_with_no_batch_dims_saveable": (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        0,
    ),
    "nothing_saveable": (jax.checkpoint_policies.nothing_saveable, 2),
    "everything_saveable": (jax.checkpoint_policies.everything_saveable, 0),
}


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_checkpoint_know_products(policy, outside):
    def fn(w):
        return jnp.sum(jnp.sin(jnp.sin(w @ w) @ w))

    saves, again = POLICIES[policy]
    around = functools.partial(jax.checkpoint, policy=saves)
    both = around(cast(fn)) if outside else cast(around(fn))
    assert len(matmul_dtypes(traced(jax.grad(both), jnp.ones((2, 2))))) == 6 + again


def test_an_offloading_policy_keeps_products():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    fn = jax.checkpoint(cast(lambda w: jnp.sum(jnp.sin(w @ w))), policy=policy)
    assert jax.grad(fn)(jnp.ones((2, 2))).dtype == jnp.float32


def test_a_product_is_transposed_like_jaxs():
    fn = cast(lambda w: X @ w)
    (found,) = jax.linear_transpose(fn, W)(jnp.ones((5, 4), jnp.bfloat16))
    np.testing.assert_array_equal(found, jnp.full((3, 4), 5.0))


def test_an_exported_program_holds_no_name_of_jamps():
    fn = jax.jit(lambda w, x: cast(jnp.matmul)(x, w))
    exported = jax.export.export(fn)(W, X)
    assert not re.search("jamp", exported.mlir_module().split("loc(")[0])
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(W, X), fn(W, X))


def test_products_of_symbolic_shapes_are_exported():
    b, c = jax.export.symbolic_shape("b, c")
    for fn, left, right in (
        (jnp.matmul, (b, c), (c, 4)),
        (lambda x, y: lax.conv(x, y, (1, 1), "SAME"), (b, 3, 5, 5), (4, 3, 3, 3)),
    ):
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (left, right)]
        exported = jax.export.export(jax.jit(cast(fn)))(*arrays)
        x, y = jnp.ones((2, 3, 5, 5)[: len(left)]), jnp.ones((3, 4))
        y = y if len(left) == 2 else jnp.ones(right)
        np.testing.assert_array_equal(exported.call(x, y), cast(fn)(x, y))
