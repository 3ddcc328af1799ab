"""Programs beside things that autocast moves data through or does not look into."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from ._construct import Construct, normal

SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
NHWC = ("NHWC", "HWIO", "NHWC")


def image(channels=2, per_group=2):
    """A picture of 6x6 pixels, and kernels of 3x3."""

    def make():
        kernels = normal(3, 3, per_group, 4, seed=1, scale=0.2)
        return normal(1, 6, 6, channels), kernels

    return make


def definite(x):
    """A positive definite matrix near the identity."""
    return jnp.eye(4) + (x + x.T) / 16


def conv(x, w, padding="SAME", **options):
    return lax.conv_general_dilated(
        x, w, (1, 1), padding, dimension_numbers=NHWC, **options
    )


def in_run_state(x, w):
    def body(refs):
        x, y = refs
        y[...] = jnp.tanh(x[...])

    return pl.run_state(body)((x @ w, jnp.zeros((4, 4))))[1] @ w


def printed(x, w):
    y = x @ w
    jax.debug.print("corner {corner}", corner=y[0, 0])
    jax.debug.callback(lambda corner: None, y[0, 0], ordered=False)
    return jnp.tanh(y) @ w


def called_back(method):
    def fn(x, w):
        y = jax.pure_callback(np.sin, SHAPE, x @ w, vmap_method=method)
        return y @ w

    return fn


def called_back_with_effects(ordered):
    def fn(x, w):
        return io_callback(np.sin, SHAPE, x @ w, ordered=ordered) @ w

    return fn


def kernel(x, w, out):
    out[...] = jnp.tanh(x[...] @ w[...])


def in_a_kernel(x, w):
    return pl.pallas_call(kernel, out_shape=SHAPE, interpret=True)(x, x @ w) @ w


def kept_whole_matmul(x, w):
    return jnp.tanh(x @ w)


partitioned = custom_partitioning(kept_whole_matmul)
partitioned.def_partition(
    lambda mesh, args, result: (
        mesh,
        kept_whole_matmul,
        result.sharding,
        tuple(arg.sharding for arg in args),
    ),
    sharding_rule="i j, j k -> i k",
)


def factorized(x, w):
    factor, _ = jax.ffi.ffi_call(
        "lapack_spotrf_ffi", (SHAPE, jax.ShapeDtypeStruct((), jnp.int32))
    )(definite(x), uplo=np.uint8(ord("U")))
    return jnp.tril(factor) @ w


def square_after_lapack():
    """The foreign functions are there once JAX has called one of them."""
    x = normal(4, 4)
    jnp.linalg.cholesky(definite(x)).block_until_ready()
    return x, normal(4, 4, seed=1, scale=0.5)


@jax.custom_batching.custom_vmap
def batched_by_rule(x, w):
    return jnp.tanh(x @ w)


@batched_by_rule.def_vmap
def _(size, batched, x, w):
    del size, batched
    return jnp.tanh(jnp.einsum("bij,bjk->bik", x, w)), True


def dropped_out(make_key):
    def fn(x, w):
        keep = jax.random.bernoulli(make_key(0), 0.5, (4, 4))
        return jnp.where(keep, jnp.tanh(x @ w) / 0.5, 0.0) @ w

    return fn


def noisy(x, w):
    first, second = jax.random.split(jax.random.fold_in(jax.random.key(0), 1))
    y = x @ w + jax.random.normal(first, (4, 4)) / 4
    return y @ jax.random.truncated_normal(second, -1, 1, (4, 4))


def decomposed(x, w):
    y = definite(x @ w)
    values, vectors = jnp.linalg.eigh(y)
    return jnp.abs(vectors) @ w, values


def singular(x, w):
    return jnp.linalg.svd(x @ w + 4 * jnp.eye(4), compute_uv=False) @ w


def triangular(x, w):
    factor = jnp.linalg.qr(x @ w + 4 * jnp.eye(4))[1]
    return jnp.abs(factor) @ w / 4


def solved(x, w):
    return jnp.linalg.solve(definite(x @ w), x) @ w


def spectrum(x, w):
    frequencies = jnp.fft.rfft2(x @ w)
    return jnp.fft.irfft2(frequencies / (1 + jnp.abs(frequencies))) @ w


def largest(x, w):
    values, places = lax.top_k(x @ w, 2)
    return values @ w[places[0]]


def ordered(x, w):
    y = x @ w
    return jnp.sort(y, axis=0) + jnp.take_along_axis(y, jnp.argsort(x, 0), 0) @ w


def known_at_trace_time(x, w):
    with jax.ensure_compile_time_eval():
        scale = float(jnp.cos(jnp.ones(())))
    result = jax.eval_shape(lambda x: x @ w, x)
    return (x @ w).reshape(result.shape) * scale


def reduced_by_a_function(x, w):
    return lax.reduce(x @ w, -jnp.inf, lambda a, b: jnp.maximum(a, b + 0.0), (0,))


def scattered(x, w):
    y = jnp.zeros((6, 4)).at[jnp.array([0, 2, 2, 5])].add(x @ w)
    return y.at[jnp.array([0, 2])].mul(w[:2], unique_indices=True) @ w


def sliced(x, w):
    i = jnp.argmax(x[0]) % 3
    y = lax.dynamic_slice(x @ w, (i, 0), (2, 4))
    return lax.dynamic_update_slice(x, y, (i, 0)) @ w[jnp.array([3, 0, 1, 2])]


def max_pooled(x, w):
    window = (1, 2, 2, 1)
    return lax.reduce_window(conv(x, w), -jnp.inf, lax.max, window, window, "VALID")


def patched(x, w):
    patches = lax.conv_general_dilated_patches(
        x, (3, 3), (1, 1), "SAME", dimension_numbers=NHWC
    )
    return jnp.tanh(patches @ w.transpose(2, 0, 1, 3).reshape(18, 4))


def resized(x, w):
    return jax.image.resize(conv(x, w), (1, 4, 4, 4), "bilinear")


def grouped_rows(x, w):
    weights = jnp.stack([w, w.T, -w])
    return jnp.tanh(lax.ragged_dot(x, weights, jnp.array([1, 0, 3], jnp.int32)))


def attended(x, w):
    q, k, v = (jnp.tanh(y).reshape(1, 4, 2, 2) for y in (x @ w, x @ w.T, x))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_platform(x, w):
    product = lambda x: jnp.tanh(x @ w)  # noqa: E731
    return lax.platform_dependent(x, cpu=product, default=product)


CALLBACK = "JAX does not differentiate callbacks"

CONSTRUCTS = (
    Construct(
        "run_state",
        in_run_state,
        no_gradient="JAX does not differentiate it in reverse mode",
        no_vmap="it has no batching rule",
    ),
    Construct("debug_print", printed),
    Construct("pure_callback", called_back("sequential"), no_gradient=CALLBACK),
    Construct(
        "pure_callback_batched", called_back("expand_dims"), no_gradient=CALLBACK
    ),
    Construct("io_callback", called_back_with_effects(False), no_gradient=CALLBACK),
    Construct(
        "io_callback_ordered",
        called_back_with_effects(True),
        no_gradient=CALLBACK,
        no_vmap="the order of the calls would not be known",
    ),
    # The kernel's matmul is the kernel's business.
    Construct("pallas_call", in_a_kernel, no_gradient="kernels have none", kept=1),
    Construct(
        "ffi_call",
        factorized,
        square_after_lapack,
        no_gradient="JAX knows nothing of foreign functions",
        no_vmap="JAX knows nothing of foreign functions",
    ),
    # How it is partitioned is said for the function as written.
    Construct(
        "custom_partitioning",
        lambda x, w: partitioned(x, w) @ w,
        kept=1,
        no_gradient="it has no derivative",
        no_vmap="it has no batching rule",
    ),
    Construct(
        "custom_vmap",
        lambda x, w: batched_by_rule(x, w) @ w,
        no_gradient="JAX does not differentiate it in reverse mode",
    ),
    Construct("random_keys", jax.jit(noisy)),
    Construct("dropout", dropped_out(jax.random.key)),
    Construct("dropout_by_a_raw_key", dropped_out(jax.random.PRNGKey)),
    Construct("fft", spectrum),
    # JAX's own code around decompositions multiplies in float32: most of it asks for
    # the highest precision, and the derivative of qr is in the dtype of qr.
    Construct(
        "cholesky",
        lambda x, w: jnp.linalg.cholesky(definite(x @ w)) @ w,
        kept_backward=1,
    ),
    Construct("solve", solved, kept=2, kept_backward=5),
    Construct(
        "inv",
        lambda x, w: jnp.linalg.inv(definite(x @ w)) @ w,
        kept=2,
        kept_backward=5,
    ),
    Construct("qr", triangular, kept_backward=2),
    Construct("eigh", decomposed, kept_backward=3),
    Construct("svd", singular, kept_backward=2),
    Construct("top_k", largest),
    Construct("sort", jax.jit(ordered)),
    Construct("known_at_trace_time", known_at_trace_time),
    Construct(
        "optimization_barrier",
        lambda x, w: lax.optimization_barrier((x @ w, x))[0] @ w,
    ),
    Construct("device_put", lambda x, w: jax.device_put((x @ w, x))[0] @ w),
    Construct("reduce", reduced_by_a_function),
    Construct("scatter", scattered),
    Construct("dynamic_slice", sliced),
    Construct("max_pool", jax.jit(max_pooled), image()),
    Construct(
        "conv_of_groups", functools.partial(conv, feature_group_count=2), image(4)
    ),
    Construct(
        "conv_dilated",
        functools.partial(
            conv, padding=((2, 2), (1, 1)), rhs_dilation=(2, 2), lhs_dilation=(2, 1)
        ),
        image(),
    ),
    Construct(
        "conv_transpose",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
        image(),
    ),
    # The patches are made by a convolution that only moves data.
    Construct("conv_patches", patched, image(), kept=1, kept_backward=2),
    # It interpolates by matmuls that ask for the highest precision, one for each side.
    Construct("image_resize", resized, image(), kept=2, kept_backward=4),
    Construct(
        "ragged_dot", grouped_rows, no_vmap="JAX batches only some of its dimensions"
    ),
    Construct(
        "einsum_chain",
        lambda x, w: jnp.einsum("ij,jk,kl,ml->im", x, w, w.T, x) / 4,
    ),
    Construct("multi_dot", lambda x, w: jnp.linalg.multi_dot([x, w, w.T, x]) / 4),
    Construct("dot_product_attention", jax.jit(attended)),
    Construct("platform_dependent", by_platform),
)
