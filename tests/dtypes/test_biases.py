"""Which addends of a product are its bias, and stay in 16 bits with it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations, traced
from tables import check_each

import jamp

DEVICES = {"gpu": "float16", "cpu": "bfloat16"}


def split(x, w):
    """A projection, as heads of four features."""
    return (x @ w).reshape(*x.shape[:-1], 2, 4)


def scores(x, w):
    return jnp.einsum("bqhd,bkhd->bhqk", split(x, w), split(x, 2 * w))


def normalised(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def layer(x, w, b):
    return x @ w + b


def experts(x, w, b):
    return jnp.einsum("ebd,edf->ebf", x, w) + b[:, None, :]


def in_a_scan(x, w, b):
    def step(h, weights):
        y = layer(h, *weights)
        return jnp.tanh(y), y

    return lax.scan(step, x, (w, b))[1]


NHWC = ("NHWC", "HWIO", "NHWC")
X, W, B = (2, 5, 8), (8, 8), (8,)
STACK = (3, 5, 8), (3, 8, 8), (3, 8)
IMAGE = (1, 4, 4, 2), (3, 3, 2, 8), B

BIASES = {
    "row": (layer, X, W, B),
    "first": (lambda x, w, b: b + x @ w, X, W, B),
    "one row of rank two": (lambda x, w, b: x @ w + b[None], X, W, B),
    "of one row": (layer, X, W, (1, 8)),
    "of one row for each": (layer, X, W, (1, 1, 8)),
    "broadcast": (lambda x, w, b: x @ w + jnp.broadcast_to(b, X), X, W, B),
    "behind a barrier": (
        lambda x, w, b: jnp.add(*lax.optimization_barrier((x, x @ w, b))[1:]),
        *(X, W, B),
    ),
    "behind a barrier, the bias first": (
        lambda x, w, b: jnp.add(*lax.optimization_barrier((b, x @ w))),
        *(X, W, B),
    ),
    "of a transposed weight": (lambda x, w, b: x @ w.T + b, X, W, B),
    "of a weight on the left": (lambda w, x, b: w @ x + b[:, None], W, (8, 5), B),
    "of a scaled weight": (lambda x, w, b: x @ (w / 8**0.5) + b, X, W, B),
    "of a normalised weight": (lambda x, w, b: x @ normalised(w) + b, X, W, B),
    "of a standardised weight": (
        lambda x, w, b: x @ ((w - w.mean(0)) / w.std(0)) + b,
        *(X, W, B),
    ),
    "after a reshape": (lambda x, w, b: split(x, w) + b, X, W, (2, 4)),
    "after a transpose": (
        lambda x, w, b: split(x, w).transpose(0, 2, 1, 3) + b[:, None],
        *(X, W, (2, 4)),
    ),
    "after a split": (
        lambda x, w, b: jnp.concatenate([h + b for h in jnp.split(x @ w, 2, -1)]),
        *(X, W, (4,)),
    ),
    "second layer": (lambda x, w, b: layer(jnp.tanh(layer(x, w, b)), w, b), X, W, B),
    "in a jit": (lambda x, w, b: jax.jit(jnp.add)(x @ w, b), X, W, B),
    "of a product in a jit": (lambda x, w, b: jax.jit(jnp.dot)(x, w) + b, X, W, B),
    "in a checkpoint": (jax.checkpoint(layer), X, W, B),
    "in a scan over layers": (in_a_scan, (5, 8), *STACK[1:]),
    "several free dimensions": (
        lambda x, w, b: jnp.einsum("btd,dhk->bthk", x, w) + b,
        *(X, (8, 2, 4), (2, 4)),
    ),
    "feature first": (
        lambda x, w, b: jnp.einsum("btd,df->fbt", x, w) + b[:, None, None],
        *(X, W, B),
    ),
    "experts": (experts, *STACK),
    "second layer of experts": (
        lambda x, w, b: experts(experts(x, w, b), w, b),
        *STACK,
    ),
    "groups": (
        lambda x, w, b: jnp.einsum("bgd,gdf->bgf", x, w) + b,
        *((5, 3, 8), *STACK[1:]),
    ),
    "vmapped layers": (jax.vmap(layer), *STACK),
    "vmapped layers of one input": (
        jax.vmap(layer, (None, 0, 0)),
        *((5, 8), *STACK[1:]),
    ),
    "ragged": (
        lambda x, w, b: lax.ragged_dot(x, w, jnp.array([2, 3, 0])) + b,
        *((5, 8), (3, 8, 8), B),
    ),
    "convolution": (
        lambda x, w, b: lax.conv(x, w, (1,), "SAME") + b[:, None],
        *(X, (8, 5, 3), B),
    ),
    "convolution, feature last": (
        lambda x, w, b: (
            lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC) + b
        ),
        *IMAGE,
    ),
    "transposed convolution": (
        lambda x, w, b: lax.conv_transpose(x, w, (2, 2), "SAME") + b,
        *IMAGE,
    ),
    "flax": (
        lambda x, w, b: nn.Dense(8).apply({"params": {"kernel": w, "bias": b}}, x),
        *(X, W, B),
    ),
}


def keys_of_a_loop(x, w, mask):
    step = lambda keys, _: (keys @ w, x @ keys.T + mask)  # noqa: E731
    return lax.scan(step, x, None, length=2)[1]


def keys_that_a_scan_left(x, w, mask):
    return x @ lax.scan(lambda _, row: (None, row @ w), None, x)[1].T + mask


def keys_that_a_scan_carried(x, w, mask):
    return x @ lax.scan(lambda keys, _: (keys @ w, None), x, length=2)[0].T + mask


def keys_that_a_fori_loop_carried(x, w, mask):
    return x @ lax.fori_loop(0, len(mask), lambda _, keys: keys @ w, x).T + mask


def mapped_keys(x, w, mask):
    return x @ lax.map(lambda row: row @ w, x).T + mask


def cached_keys(x, w, mask):
    cache = lax.dynamic_update_slice(jnp.ones((5, 8)), x[:1] @ w, (0, 0))
    return (x @ w) @ cache.T + mask


def normed_keys(x, w, mask):
    norm = nn.LayerNorm(use_bias=False, use_scale=False)
    q, k = norm.apply({}, x @ w), norm.apply({}, x @ (2 * w))
    return jnp.einsum("bqd,bkd->bqk", q, k) + mask


def alibi(x, w, slopes):
    return scores(x, w) + slopes[:, None, None] * jnp.arange(5.0)


def relative(x, w, slopes):
    distance = jnp.arange(5.0) - jnp.arange(5.0)[:, None]
    return scores(x, w) + slopes[:, None, None] * distance


def plus(x, w, addend):
    return scores(x, w) + addend


QK = (2, 5, 4), (2, 5, 4)


def linear(x, w):
    return nn.Dense(w.shape[1], use_bias=False).apply({"params": {"kernel": w}}, x)


PROMOTING = {
    "residual": (lambda x, w, _: x @ w + x, X, W, B),
    "residual of one row": (lambda x, w, _: x @ w + x, (1, 8), W, B),
    "residual of one example": (lambda x, w, _: x @ w + x, (8,), W, B),
    "after an activation": (lambda x, w, b: jnp.tanh(x @ w) + b, X, W, B),
    "factor": (lambda x, w, b: (x @ w) * b, X, W, B),
    "positions and features": (lambda x, w, table: x @ w + table, X, W, (5, 8)),
    "shift by example": (lambda x, w, c: x @ w + c[:, None], X, W, (2, 8)),
    "shift by example behind a layer": (
        lambda x, w, c: linear(jnp.tanh(x @ w), w) + c[:, None, None],
        *(X, W, (2,)),
    ),
    "bin centres": (lambda x, w, _: x @ w + jnp.linspace(170.0, 180.0, 8), X, W, B),
    "indices": (lambda x, w, _: x @ w + (30.0 * jnp.arange(8) + 17000), X, W, B),
    "mean": (lambda x, w, _: x @ w + x.mean(1, keepdims=True), X, W, B),
    "mean of one example": (
        lambda x, w, _: x @ w + x.mean(1, keepdims=True),
        *((1, 5, 8), W, B),
    ),
    "one example's embedding": (
        lambda x, w, t: jax.jit(jnp.add)(x @ w, (t @ w).astype(jnp.float32)),
        *((1, 5, 8), W, (1, 1, 8)),
    ),
    "bias of one row": (lambda x, w, b: x @ w + b, (1, 8), W, (1, 8)),
    "bias of one text": (lambda x, w, b: x @ w + b, (1, 5, 8), W, (1, 1, 8)),
    "alibi": (alibi, X, W, (2,)),
    "relative alibi": (relative, X, W, (2,)),
    "relative positions": (plus, X, W, (5, 5)),
    "relative positions of heads": (plus, X, W, (2, 5, 5)),
    "broadcast relative positions": (
        lambda x, w, p: plus(x, w, jnp.broadcast_to(p, (2, 2, 5, 5))),
        *(X, W, (5, 5)),
    ),
    "mask of keys": (plus, X, W, (5,)),
    "mask of each example's keys": (plus, X, W, (2, 1, 1, 5)),
    "bias of heads": (plus, X, W, (2, 1, 1)),
    "mask of one head": (lambda x, w, m: (x @ w) @ (x @ w).T + m, (5, 8), W, (5,)),
    "mask of normalised keys": (
        lambda x, w, m: normalised(x @ w) @ normalised(x @ w).T + m,
        *((5, 8), W, (5,)),
    ),
    "mask of keys after a norm": (normed_keys, X, W, (5,)),
    "mask of keys in a jit": (
        lambda x, w, m: jax.jit(lambda q, k: q @ k.T + m)(x @ w, normalised(x @ w)),
        *((5, 8), W, (5,)),
    ),
    "mask of keys from a loop": (keys_of_a_loop, (5, 8), W, (5,)),
    "mask of keys that a scan left": (keys_that_a_scan_left, (5, 8), W, (5,)),
    "mask of keys that a scan carried": (keys_that_a_scan_carried, (5, 8), W, (5,)),
    "mask of keys that a fori_loop carried": (
        keys_that_a_fori_loop_carried,
        *((5, 8), W, (5,)),
    ),
    "mask of mapped keys": (mapped_keys, (5, 8), W, (5,)),
    "mask of cached keys": (cached_keys, (5, 8), W, (5,)),
    "mask of keys that came in": (
        lambda q, k, m: jnp.einsum("bqd,bkd->bqk", q, k) + m[:, None],
        *(*QK, (2, 5)),
    ),
    "mask of transposed keys that came in": (
        lambda q, k, m: q @ k.swapaxes(1, 2) + m[:, None],
        *(*QK, (2, 5)),
    ),
    "vmapped mask of keys that came in": (
        jax.vmap(lambda q, k, m: q @ k.T + m),
        *(*QK, (2, 5)),
    ),
}


def assert_dtype(row, device, dtype):
    fn, *shapes = row
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = jax.eval_shape(jamp.autocast(fn, device_type=device), *arguments)
    assert found.dtype == dtype


@pytest.mark.parametrize("device, dtype", DEVICES.items())
def test_a_bias_is_part_of_its_product(device, dtype):
    check_each(BIASES, lambda name: assert_dtype(BIASES[name], device, dtype))


# What is multiplied there is rounded before.
OF_INEXACT_FACTORS = {
    "of a scaled weight",
    "of a normalised weight",
    "of a standardised weight",
    "second layer",
    "second layer of experts",
    "in a scan over layers",
}
# Apart from their biases, or products of JAX's own.
ROUNDED_TWICE = {
    "behind a barrier",
    "behind a barrier, the bias first",
    "in a jit",
    "of a product in a jit",
    "ragged",
}


def test_on_a_cpu_a_product_and_its_bias_are_rounded_once_as_in_torch():
    # Exact in bfloat16, and biases about as large as the products.
    largest = 16, 16, 250

    def check(name):
        rng = np.random.default_rng(0)
        fn, *shapes = BIASES[name]
        arguments = [
            jnp.asarray(rng.integers(-most, most + 1, shape), jnp.float32)
            for most, shape in zip(largest, shapes, strict=True)
        ]
        found = jax.jit(jamp.autocast(fn, device_type="cpu"))(*arguments)
        exact = jax.jit(fn)(*arguments).astype(jnp.bfloat16)
        assert found.dtype == exact.dtype
        same = bool((found == exact).all())
        assert same == (name not in ROUNDED_TWICE)

    check_each([name for name in BIASES if name not in OF_INEXACT_FACTORS], check)


def test_each_sum_of_one_product_is_rounded_once():
    def fn(x, w, b):
        product = x @ w
        moved = product.reshape(X)
        return product + b, product + b, moved + b, b + moved

    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape) for shape in ((10, 8), W, B)]
    first, *others = jamp.autocast(fn, device_type="cpu")(*map(jnp.float32, arguments))
    for other in others:
        np.testing.assert_array_equal(first, other.reshape(first.shape))


def test_a_product_may_be_moved_ever_so_often_before_its_bias_is_added():
    def fn(x, w, b):
        return functools.reduce(lambda y, _: y.T.T, range(600), x @ w) + b

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((5, 8), W, B)]
    found = jax.eval_shape(jamp.autocast(fn, device_type="cpu"), *arguments)
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_in_float64_is_not_cast(device):
    with jax.enable_x64(True):
        x, w, b = (np.full(s, 1 + 2.0**-20) for s in (X, W, B))
        own = jamp.autocast(layer, device_type=device)
        found = own(np.float32(x), np.float32(w), b)
        assert found.dtype == "float64"
        zeros = own(np.zeros(X, np.float32), np.float32(w), b)
        np.testing.assert_array_equal(zeros, np.broadcast_to(b, X))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_bias_promotes(device):
    check_each(PROMOTING, lambda name: assert_dtype(PROMOTING[name], device, "float32"))


@pytest.mark.parametrize("device, dtype", DEVICES.items())
def test_keys_that_came_in_16_bits_are_no_weight(device, dtype):
    fn = jamp.autocast(lambda q, k, mask: q @ k.T + mask, device_type=device)
    q = jnp.ones((5, 8))
    assert fn(q, q, q[:, 0]).dtype == dtype
    for low in DEVICES.values():  # whichever is in force
        assert fn(q, q.astype(low), q[:, 0]).dtype == jnp.float32


@pytest.mark.parametrize("device", DEVICES)
def test_positions_far_apart_are_told_apart(device):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 6, 8)).astype(np.float32)
    slopes = np.float32([0.37, 0.021])

    def attend(slopes, q, k, v):
        # Those are near each other; so far out a step of float16 is wider than one.
        positions = 4099.0 + jnp.arange(6.0)
        bias = slopes[:, None, None] * positions
        q, k = (x @ jnp.eye(8) for x in (q / 8, k))
        weights = jax.nn.softmax(q @ k.swapaxes(2, 3) + bias)
        return jnp.sum((weights @ v)[..., 0])

    with jax.enable_x64(True):
        wide = [np.float64(x) for x in (slopes, q, k, v)]
        expected = jax.value_and_grad(attend)(*wide)
    fn = jamp.autocast(attend, device_type=device)
    actual = jax.jit(jax.value_and_grad(fn))(slopes, q, k, v)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0.02), actual, expected
    )


def test_a_cast_between_a_product_and_its_bias_is_made():
    def fn(x, w, b):
        product = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return product.astype(jnp.float16) + b

    args = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.full(8, 0.5)
    found = jamp.autocast(fn, device_type="cpu")(*args)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, np.full((4, 8), 8.5))


def test_a_piece_of_a_large_product_is_rounded_with_the_product():
    """Else the largest array of a program would be float32 for a part of it."""
    shapes = (4096, 64), (64, 4096), (128,)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    fn = jamp.autocast(lambda x, w, b: (x @ w)[:, :128] + b, device_type="cpu")
    products = [e for e in equations(traced(fn, *args)) if "dot" in e.primitive.name]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.bfloat16]
