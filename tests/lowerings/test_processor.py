"""Processors that cannot multiply bfloat16: a warning, and products in float32."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding
from processors import HELD_BACK, NEW, OLD

import jamp
from jamp._lowerings.processor import Processor

X = jnp.ones((16, 16))
IN_FLOAT32 = "algorithm = <lhs_precision_type = f32, rhs_precision_type = f32"


@pytest.mark.parametrize(
    ("cpu_info", "gains"),
    [
        (OLD, False),
        (NEW, True),
        (HELD_BACK, False),
        (HELD_BACK.replace("GenuineIntel", "AuthenticAMD"), True),
        (HELD_BACK.replace(" avx512_fp16", ""), True),
        (HELD_BACK.replace("avx512f", "amx_bf16 amx_tile"), True),
        (OLD.replace("avx512f", "amx_bf16 amx_tile"), True),
        # Nobody has measured what XLA makes of them.
        ("Features\t: fp asimd bf16 i8mm\n", None),
        ("Features\t: fp asimd\n", False),
        ("", None),
    ],
)
def test_what_processors_gain_is_told_by_their_flags(cpu_info, gains):
    assert Processor.described(cpu_info).gains is gains


@pytest.fixture
def old_processor(choose_processor):
    choose_processor("old")


@pytest.mark.usefixtures("old_processor")
def test_autocast_on_a_slow_processor_warns_once_where_it_is_called():
    words = "saves time in convolutions at most"
    with pytest.warns(jamp.JampWarning, match=words) as caught:
        jamp.autocast(jnp.matmul)(X, X)
        jamp.autocast(jnp.dot)(X, X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize(
    ("dtype", "words"),
    [(jnp.bfloat16, "for bfloat16 "), (jnp.float16, "for 16-bit products ")],
)
def test_the_warning_names_what_is_asked_for_and_the_users_line_in_jit(dtype, words):
    product = jax.jit(jamp.autocast(jnp.matmul, dtype=dtype, device_type="cpu"))
    with pytest.warns(jamp.JampWarning, match=words) as caught:
        product(X, X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (jnp.bfloat16, r"for bfloat16 \(BF16\): autocast saves no time"),
        (jnp.float16, "float16 no faster than float32 in XLA: autocast saves no time"),
    ],
)
def test_the_warning_on_arm_names_no_instructions_of_x86_nor_convolutions(
    choose_processor, dtype, words
):
    choose_processor("Features\t: fp asimd fphp asimdhp\n")
    with pytest.warns(jamp.JampWarning, match=words):
        jamp.autocast(jnp.matmul, dtype=dtype, device_type="cpu")(X, X)


def test_float16_on_a_processor_for_bfloat16_is_warned_of_once(choose_processor):
    choose_processor("avx512_bf16")
    fn = jamp.autocast(jnp.matmul, dtype=jnp.float16, device_type="cpu")
    with pytest.warns(jamp.JampWarning, match="float16 no faster.* bfloat16") as caught:
        fn(X, X)
        jax.jit(fn)(X, X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize("options", [{"device_type": "gpu"}, {"enabled": False}])
def test_other_devices_and_a_disabled_autocast_warn_of_nothing(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jamp.autocast(jnp.matmul, **options)(X, X)


def products(fn, *args, platform="cpu"):
    """Of each product of a lowered program: dtypes, and whether it is in float32."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [
        (*re.findall(r"tensor<[\dx]*(\w+)>", line), IN_FLOAT32 in line)
        for line in text.splitlines()
        if "stablehlo.dot_general" in line
    ]


def of_two_computed(x, y):
    """A product of which no operand is a weight."""
    return jnp.tanh(x) @ jnp.tanh(y)


WIDE, PLAIN = ("f32", "f32", "f32", True), ("bf16", "bf16", "bf16", False)
# XLA's fast products of small matrices have float32 results, which are rounded.
LOW = (*PLAIN[:2], "f32", False)


@pytest.mark.parametrize(
    ("cpu_info", "platform", "product"),
    [
        ("old", "cpu", WIDE),
        ("avx512_bf16", "cpu", LOW),
        ("", "cpu", PLAIN),
        ("Features\t: fp asimd bf16 i8mm\n", "cpu", PLAIN),
        ("old", "cuda", PLAIN),
        ("avx512_bf16", "cuda", PLAIN),
    ],
)
def test_bfloat16_matrices_are_multiplied_as_is_fastest(
    choose_processor, cpu_info, platform, product
):
    choose_processor(cpu_info)
    fn = jamp.autocast(of_two_computed, dtype=jnp.bfloat16)
    assert products(fn, X, X, platform=platform) == [product]
    # A sum of its gradients, in 16 bits: their dtype is that of the operands.
    low = X.astype(jnp.bfloat16)
    loss = jax.grad(lambda x, y: jnp.sum(fn(x, y)), argnums=(0, 1))
    assert products(loss, low, low, platform=platform) == [product] * 2


def test_large_products_are_rounded_by_xla_where_that_is_as_fast(choose_processor):
    choose_processor("avx512_bf16")
    large = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    fast = jaxlib.version.__version_info__ >= (0, 11)
    fn = jamp.autocast(jnp.matmul, dtype=jnp.bfloat16)
    assert products(fn, large, large) == [PLAIN if fast else LOW]


@pytest.mark.parametrize("processor", ["old", "avx512_bf16"])
def test_float16_matrices_are_multiplied_in_float32_on_every_processor(
    choose_processor, processor
):
    choose_processor(processor)
    fn = jamp.autocast(jnp.matmul, dtype=jnp.float16, device_type="cpu")
    assert products(fn, X, X) == [WIDE]


def test_several_devices_are_spared_float32_copies_of_what_they_share(choose_processor):
    choose_processor("old")
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    shared = jax.device_put(X, NamedSharding(mesh, P("i")))
    assert products(jamp.autocast(jnp.matmul), shared, X) == [PLAIN]
    # Each has its own part of it in a shard_map.
    own = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    assert products(jamp.autocast(own), shared, X) == [WIDE]


@pytest.mark.parametrize(
    ("rows", "size", "reads"),
    [(12, 1024, True), (13, 1024, False), (24, 512, True), (25, 512, False)],
)
def test_weights_are_not_cast_for_few_rows_nor_small_ones_for_some_more(
    choose_processor, rows, size, reads
):
    choose_processor("avx512_bf16")
    fn = jamp.autocast(lambda x, w: jnp.tanh(x) @ w, dtype=jnp.bfloat16)
    shapes = (rows, size), (size, size)
    found = products(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    # The second is there until it is known that no other product reads the weight.
    assert found == ([WIDE, LOW] if reads else [LOW])


@pytest.mark.parametrize(
    ("rows", "size", "product"), [(1, 512, WIDE), (2, 512, LOW), (1, 1024, LOW)]
)
def test_a_row_and_a_small_matrix_are_multiplied_in_float32(
    choose_processor, rows, size, product
):
    """In less time than two rows are made of it."""
    choose_processor("amx_bf16")
    fn = jamp.autocast(of_two_computed, dtype=jnp.bfloat16)
    shapes = (rows, size), (size, size)
    pair = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert products(fn, *pair) == [product]


@pytest.mark.parametrize("processor", ["old", "held back"])
def test_where_products_are_in_float32_weights_are_not_cast(
    choose_processor, processor
):
    choose_processor(processor)
    rows = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    weight = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    fn = jamp.autocast(lambda x, w: jnp.tanh(x) @ w, dtype=jnp.bfloat16)
    compiled = jax.jit(fn).lower(rows, weight).compile()
    assert "bf16[1024,1024]" not in compiled.as_text()


ROWS = {
    "few": (32, 1024, LOW),
    "many": (33, 1024, WIDE),
    "few of a small matrix": (32, 64, WIDE),
}


@pytest.mark.parametrize("name", ROWS)
def test_instructions_as_slow_as_float32_multiply_few_rows_of_large_matrices_alone(
    choose_processor, name
):
    """These take less time than a float32 copy of the matrix."""
    choose_processor("held back")
    rows, size, product = ROWS[name]
    matrix = jax.ShapeDtypeStruct((size, size), jnp.float32)
    fn = jamp.autocast(of_two_computed, dtype=jnp.bfloat16)
    for shape in ((rows, size), (size, rows)):
        pair = [jax.ShapeDtypeStruct(shape, jnp.float32), matrix]
        assert products(fn, *(pair if shape[0] == rows else pair[::-1])) == [product]


@pytest.mark.parametrize(
    "product",
    [
        jax.lax.dot,
        lambda x, w: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        lambda x, w: nn.Dense(16).apply({"params": {"kernel": w, "bias": w[0]}}, x),
        lambda x, w: jnp.einsum("ij,jk->ki", x, w),
    ],
    ids=["dot", "dot_general", "linen.Dense", "einsum"],
)
@pytest.mark.usefixtures("old_processor")
def test_so_they_are_however_the_product_is_written(product):
    assert {*products(jamp.autocast(product), X, X)} == {WIDE}


@pytest.mark.usefixtures("old_processor")
def test_a_precision_that_the_program_asks_for_stays_on_an_old_processor():
    precise = jamp.autocast(lambda x, y: jnp.matmul(x, y, precision="highest"))
    assert products(precise, X, X) == [("f32", "f32", "f32", False)]


LAYOUTS = {
    "rows by columns": "ij,jk->ik",
    "both transposed": "ji,kj->ki",
    "batch first": "bij,bjk->bik",
    "batch in the middle": "ibj,jbk->bik",
    "attention scores": "bqhd,bkhd->bhqk",
    "attention values": "bhqk,bkhd->bqhd",
    "outer product": "bi,bj->bij",
    "vector": "ij,j->i",
}
SIZES = dict(b=2, h=3, i=4, j=5, k=6, q=4, d=5)


@pytest.mark.parametrize("processor", ["old", "avx512_bf16", "held back"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_derivatives_of_products_in_every_layout(choose_processor, processor, layout):
    choose_processor(processor)
    rng = np.random.default_rng(0)
    names = layout.partition("->")[0].split(",")
    # Small integers: their products and sums are exact in 16 bits too.
    x, y = (
        jnp.asarray(rng.integers(-2, 3, [SIZES[n] for n in name]), jnp.float32)
        for name in names
    )

    tangents = jnp.sign(x), jnp.sign(y)

    def plain(x, y):
        return jnp.einsum(layout, x, y)

    product = jamp.autocast(plain, device_type="cpu", dtype=jnp.bfloat16)

    def derivatives(fn):
        def total(x, y):
            return jnp.sum(fn(x, y).astype(jnp.float32) ** 2) / 8

        gradient = jax.grad(total, argnums=(0, 1))
        return (
            gradient(x, y),
            jax.jvp(fn, (x, y), tangents),
            jax.jvp(gradient, (x, y), tangents),
            jax.vmap(fn)(jnp.stack([x, -x]), jnp.stack([y, y])),
        )

    ours, theirs = (jax.jit(derivatives, static_argnums=0)(f) for f in (product, plain))
    for found, expected in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected, rtol=0.02, atol=0.5
        )
