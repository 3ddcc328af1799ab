"""Programs whose arguments, constants or intermediate values are not all float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._construct import Construct, normal, square

COUNTING = np.arange(16.0).reshape(4, 4) / 16  # float64, which JAX takes as float32


def cast_to(x_dtype, w_dtype):
    """Makes the usual arguments in other dtypes."""

    def make():
        x, w = square()
        return x.astype(x_dtype), w.astype(w_dtype)

    return make


def tanh_of_product(x, w):
    return jnp.tanh(x @ w)


def widened(x, w):
    return jnp.tanh(x.astype(jnp.float32) @ w.astype(jnp.float32))


def of_numpy():
    """Arrays and a scalar of NumPy."""
    x, w = map(np.asarray, square())
    return x, w, np.float32(0.5)


def quantized(x, q, scale):
    """A weight kept in 8 bits, and a scale for each of its columns."""
    return jnp.tanh(x @ (q.astype(jnp.float32) * scale))


def quantized_arguments():
    q = jax.random.randint(jax.random.key(2), (4, 4), -127, 128, jnp.int8)
    return normal(4, 4), q, jnp.full((4,), 2.0**-7)


def in_a_complex_plane(x, w):
    z = lax.complex(x @ w, x)
    turned = z * jnp.exp(1j * x)
    return jnp.abs(turned) @ w, jnp.real(turned), jnp.imag(jnp.conj(turned))


def complex_result(x, w):
    return (x @ w) * (1 + 1j)


def with_float64_inside(x, w):
    with jax.enable_x64(True):
        wide = (x @ w).astype(jnp.float64)
        return (wide - wide.mean()).astype(jnp.float32) @ w


def of_python_scalars(x, w):
    y = 2.0 * (x @ w) + 1
    return jnp.where(x > 0, y, 0.5 * y) / 2 @ w**2


def of_numpy_constants(x, w):
    y = (x @ COUNTING) * np.float32(0.5) + np.float64(1.0)
    return jnp.arctan2(y, 1 + COUNTING) @ w + np.arange(4)


def masked(x, w, mask):
    y = jnp.where(mask, x @ w, 0.0) @ w
    return y * mask, mask.astype(jnp.float32) @ w, ~mask


def mask_and_arrays():
    return *square(), normal(4, 4, seed=2) > 0


def with_indices(x, table, indices):
    rows = table[indices] + jax.nn.one_hot(indices, 4)
    return jnp.tanh(x @ rows), indices + 1


def noisy(x, w, key):
    first, second = jax.random.split(key)
    return x @ w + jax.random.normal(first, (4, 4)) / 4, jax.random.key_data(second)


def ranks_of_products(x, w):
    """A product of vectors, of vector and matrix, of batches, and an outer one."""
    batch = jnp.stack([w, w.T])
    return x[0] @ w[1], x[0] @ w, w @ x[0], batch @ x, jnp.outer(x[0], w[1]) @ w


def precision_of_results(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


CONSTRUCTS = (
    Construct("bfloat16_arguments", widened, cast_to(jnp.bfloat16, jnp.bfloat16)),
    Construct("float16_arguments", widened, cast_to(jnp.float16, jnp.float16)),
    Construct("mixed_arguments", widened, cast_to(jnp.float16, jnp.bfloat16)),
    Construct("numpy_arguments", lambda x, w, scale: jnp.tanh(x @ w * scale), of_numpy),
    Construct("numpy_constants", of_numpy_constants),
    Construct("python_scalars", of_python_scalars),
    Construct("quantized_weight", quantized, quantized_arguments),
    Construct("complex_values", in_a_complex_plane),
    Construct("complex_result", complex_result),
    Construct("float64_inside", with_float64_inside),
    Construct("mask_argument", masked, mask_and_arrays),
    Construct(
        "index_argument", with_indices, lambda: (*square(), jnp.array([3, 0, 0, 1]))
    ),
    Construct("key_argument", noisy, lambda: (*square(), jax.random.key(3))),
    Construct("products_of_all_ranks", ranks_of_products),
    Construct("preferred_float32", precision_of_results),
    Construct("no_rows", tanh_of_product, lambda: (normal(0, 4), normal(4, 4))),
    Construct(
        "nothing_to_contract",
        lambda x, w: x @ w + 1.0,
        lambda: (normal(4, 0), normal(0, 4)),
    ),
    Construct(
        "empty_scan",
        lambda x, w: lax.scan(lambda c, row: (c @ w, row @ w), x, x[:0]),
        square,
    ),
)
