"""Processors that cannot multiply bfloat16: a warning, and products in float32."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

import jamp
from jamp._lowerings import lower as _processor

OLD = "model name\t: An x86\nflags\t\t: fpu sse2 avx2 avx512f\n\nprocessor: 1"
NEW = OLD.replace("avx512f", "avx512f avx512_bf16")
X = jnp.ones((2, 2))
IN_FLOAT32 = jax.lax.DotAlgorithmPreset.F32_F32_F32


@pytest.mark.parametrize(
    ("cpu_info", "multiplies"),
    [
        (OLD, False),
        (NEW, True),
        (OLD.replace("avx512f", "amx_bf16 amx_tile"), True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", None),
    ],
)
def test_processors_are_told_by_their_flags(cpu_info, multiplies):
    assert _processor.multiplies_bfloat16(cpu_info) is multiplies


@pytest.fixture
def choose_processor(monkeypatch, tmp_path):
    caches = (_processor.multiplies_bfloat16, _processor.warn_if_slow)

    def choose(cpu_info, devices=1):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        file = tmp_path / "cpuinfo"
        file.write_text(cpu_info, encoding="utf-8")
        monkeypatch.setattr(_processor, "_CPU_INFO", file)
        for cached in caches:
            cached.cache_clear()

    yield choose
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def old_processor(choose_processor):
    choose_processor(OLD)


@pytest.mark.usefixtures("old_processor")
def test_autocast_on_a_slow_processor_warns_once_where_it_is_called():
    with pytest.warns(jamp.JampWarning, match="saves no time on it") as caught:
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


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize("options", [{"device_type": "gpu"}, {"enabled": False}])
def test_other_devices_and_a_disabled_autocast_warn_of_nothing(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jamp.autocast(jnp.matmul, **options)(X, X)


def products(fn, *args):
    """Dtypes of operands and result, and the precision, of the matmuls of a program."""
    return [
        (*(var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars)), precision)
        for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if eqn.primitive.name == "dot_general"
        for precision in [eqn.params["precision"]]
    ]


@pytest.mark.parametrize(
    ("cpu_info", "device_type", "precision"),
    [
        (OLD, "cpu", IN_FLOAT32),
        (NEW, "cpu", None),
        ("", "cpu", None),
        (OLD, "gpu", None),
    ],
)
def test_16_bit_matrices_are_multiplied_in_float32_where_that_is_faster(
    choose_processor, cpu_info, device_type, precision
):
    choose_processor(cpu_info)
    product = jamp.autocast(jnp.matmul, device_type=device_type, dtype=jnp.bfloat16)
    low = "bfloat16"
    assert products(product, X, X) == [(low, low, low, precision)]
    loss = jax.value_and_grad(lambda x, y: jnp.sum(product(x, y)), argnums=(0, 1))
    assert products(loss, X, X) == [(low, low, low, precision)] * 3


def test_several_devices_are_spared_float32_copies_of_what_they_share(choose_processor):
    choose_processor(OLD, devices=2)
    assert products(jamp.autocast(jnp.matmul), X, X) == [("bfloat16",) * 3 + (None,)]


@pytest.mark.parametrize(
    "product",
    [
        jax.lax.dot,
        lambda x, w: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
        lambda x, w: nn.Dense(2).apply({"params": {"kernel": w, "bias": w[0]}}, x),
        lambda x, w: jnp.einsum("ij,jk->ki", x, w),
    ],
    ids=["dot", "dot_general", "linen.Dense", "einsum"],
)
@pytest.mark.usefixtures("old_processor")
def test_so_they_are_however_the_product_is_written(product):
    low = "bfloat16"
    assert products(jamp.autocast(product), X, X) == [(low, low, low, IN_FLOAT32)]


@pytest.mark.usefixtures("old_processor")
def test_a_precision_that_the_program_asks_for_stays_on_an_old_processor():
    precise = jamp.autocast(lambda x, y: jnp.matmul(x, y, precision="highest"))
    highest = jax.lax.Precision.HIGHEST
    assert products(precise, X, X) == [("float32",) * 3 + ((highest, highest),)]


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


@pytest.mark.parametrize("cpu_info", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_derivatives_of_products_in_every_layout(choose_processor, cpu_info, layout):
    choose_processor(cpu_info)
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


@pytest.mark.usefixtures("old_processor")
def test_a_checkpoint_policy_still_knows_products_in_float32():
    saving = jax.checkpoint(
        lambda x: jnp.sum(jnp.sin(jnp.sin(x @ x) @ x)),
        policy=jax.checkpoint_policies.dots_saveable,
    )
    backward = products(jax.grad(jamp.autocast(saving)), X)
    assert len(backward) == 2 + 4  # none of the two is computed again
