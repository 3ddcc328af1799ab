"""The precision of products: asked for in the program, or configured for all."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import each_device
from flax import linen, nnx
from jaxprs import equations, matmul_dtypes, traced

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
LOW_PAIR = ("float16", "float16")

x44 = jnp.ones((4, 4))

HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
PRODUCTS = {
    "matmul": lambda x: x @ x,
    "einsum in a jit": jax.jit(lambda x: jnp.einsum("ij,kj->ik", x, x)),
    "conv": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "matmul in a scan": lambda x: jax.lax.scan(lambda c, w: (c, c @ w), x, x)[1],
}


@pytest.fixture
def configured(request):
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", request.param)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def precisions(program):
    return [
        e.params["precision"] for e in equations(program) if "precision" in e.params
    ]


@pytest.mark.parametrize(
    "configured", ["tensorfloat32", "highest", "TF32_TF32_F32"], indirect=True
)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.usefixtures("configured")
def test_the_configured_precision_of_float32_products_does_not_keep_them(product):
    """In torch `set_float32_matmul_precision` leaves autocast alone too."""
    fn = gpu(product)
    program = traced(jax.grad(lambda x: fn(x).astype(jnp.float32).sum()), x44)
    assert set(matmul_dtypes(program)) == {LOW_PAIR}
    lowered = jax.jit(fn).trace(x44).lower(lowering_platforms=("cuda",)).as_text()
    assert "DEFAULT" in lowered
    assert not {"HIGHEST", "HIGH]", "algorithm", "tf32"} & set(re.split(r"\W", lowered))


def test_the_precision_of_a_context_around_the_call_does_not_keep_products():
    fn = gpu(lambda x: x @ x)
    for call in (fn, jax.jit(fn), gpu(jax.jit(lambda x: x @ x))):
        assert call(x44).dtype == jnp.float16
        with jax.default_matmul_precision("highest"):
            assert call(x44).dtype == jnp.float16


@pytest.mark.parametrize("configured", [None, "high"], indirect=True)
@pytest.mark.usefixtures("configured")
def test_a_precision_asked_for_in_the_function_keeps_the_product():
    def in_a_context(x):
        with jax.default_matmul_precision("highest"):
            return x @ x

    for fn in (in_a_context, lambda x: jnp.matmul(x, x, precision="highest")):
        for program in (traced(gpu(fn), x44), traced(gpu(jax.jit(fn)), x44)):
            assert matmul_dtypes(program) == [("float32", "float32")]
            assert precisions(program) == [HIGHEST]


@pytest.mark.parametrize("configured", ["highest"], indirect=True)
@pytest.mark.usefixtures("configured")
def test_products_that_stay_float32_keep_the_configured_precision():
    float32 = jamp.Policy.load("gpu").with_rules(float32=["dot_general"])

    def fn(x):
        with jamp.autocast(enabled=False):
            y = x @ x
        return y @ y.T

    assert precisions(traced(jamp.autocast(fn, policy=float32), x44)) == [HIGHEST] * 2


@pytest.mark.parametrize("configured", ["highest"], indirect=True)
@pytest.mark.usefixtures("configured")
def test_the_configured_precision_does_not_keep_a_lowered_function():
    def layer(x, w):
        return jnp.tanh(x @ w)

    policy = jamp.Policy.load("gpu").with_rules(lower=[layer])
    fn = jamp.autocast(lambda x: layer(x, x), policy=policy)
    assert matmul_dtypes(traced(fn, x44)) == [LOW_PAIR]
    assert fn(x44).dtype == jnp.float16


WIDE_LAYERS = {
    "linen": lambda **kinds: linen.Einsum((4, 4), "ij,jk->ik", False, **kinds).bind(
        {"params": {"kernel": x44 / 3}}
    ),
    "nnx": lambda **kinds: nnx.Einsum(
        "ij,jk->ik", (4, 4), None, rngs=nnx.Rngs(0), **kinds
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("library", WIDE_LAYERS)
def test_a_result_wider_than_a_layers_16_bits_is_kept(library, dtype):
    layer = WIDE_LAYERS[library](dtype=dtype, preferred_element_type=jnp.float32)
    run = gpu(lambda x: layer(x), dtype=dtype)
    actual = jax.jit(run)(x44)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, layer(x44))


@each_device
def test_a_layer_whose_product_is_of_integers_is_not_rounded_before_it(device):
    def quantized(array):
        scale = jnp.abs(array).max() / 127
        return jnp.round(array / scale).astype(jnp.int8), scale

    def product(x, w, numbers, precision=None, preferred_element_type=None):
        del precision, preferred_element_type
        (x, x_scale), (w, w_scale) = quantized(x), quantized(w)
        found = jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.int32)
        return found * x_scale * w_scale

    layer = linen.Dense(16, dot_general=product)
    x = jax.random.normal(jax.random.key(0), (8, 32))
    variables = layer.init(jax.random.key(1), x)
    actual = jamp.autocast(layer.apply, device_type=device)(variables, x)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, layer.apply(variables, x), rtol=1e-6)
