"""Products of jamp's own against JAX's in float32, exactly.

Operands are small integers, which 16 bits and their products hold exactly: results and
gradients are equal to those of float32, not near them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

import jamp


def cast(fn):
    return jamp.autocast(fn, device_type="cpu", dtype=jnp.bfloat16)


def integers(seed, shape):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def derivatives(fn, x, y, ct):
    """Results, gradients, tangents and batches of a product."""

    def scaled(x, y):
        return jnp.vdot(fn(x, y).astype(jnp.float32), ct)

    gradients = jax.grad(scaled, argnums=(0, 1))
    stacked = jnp.stack([x, x - 1]), jnp.stack([y, y + 1])
    return (
        fn(x, y),
        gradients(x, y),
        jax.jvp(fn, (x, y), (jnp.sign(x), jnp.sign(y))),
        jax.jvp(gradients, (x, y), (jnp.sign(x), jnp.sign(y))),
        jax.vmap(fn, (0, 0))(*stacked),
        jax.vmap(fn, (None, 0), min(ct.ndim, 1))(x, stacked[1]),
        jax.vmap(gradients, (0, None))(stacked[0], y),
    )


def assert_equal_derivatives(fn, x, y):
    ct = jax.device_put(integers(2, jax.eval_shape(fn, x, y).shape))
    # One program: to compile it takes less time than to compile two.
    both = jax.jit(lambda *args: [derivatives(f, *args) for f in (cast(fn), fn)])
    # Users may have JAX raise where ranks are promoted.
    with jax.numpy_rank_promotion("raise"):
        found = both(x, y, ct)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        # What has 16 bits was rounded once.
        np.testing.assert_array_equal(a, b.astype(a.dtype))


def einsum_of(subscripts, *shapes):
    """A product, two arrays of integers of these shapes, and both in 16 bits."""
    x, y = (jax.device_put(integers(i, shape)) for i, shape in enumerate(shapes))
    low = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return functools.partial(jnp.einsum, subscripts), x, y, low


def operands_of_product(fn, x, y):
    """What a product takes, without the dimension more that it may have in front."""
    lowered = jax.jit(fn).lower(x, y).as_text()
    (taken,) = re.findall(r"dot_general .*: \(tensor<(.*)\) ->", lowered)
    return re.sub(r"^1x|(?<=tensor<)1x", "", taken)
