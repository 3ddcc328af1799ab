"""softmax, layer norm, cross entropy and others are as accurate as PyTorch's kernels.

Those compute in float32 inside and round once, whatever the dtype of the activations.
So does jamp, also where the program as written is in 16 bits throughout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.scipy.stats
import numpy as np
import optax
import pytest

import jamp

SCALES = (1e-3, 1.0, 1e3)
DEVICES = ("gpu", "cpu")
DTYPES = (jnp.float16, jnp.bfloat16)
ROWS, FEATURES = 16, 256

# What float32 itself may be off by, in units of its spacing at the largest number that
# enters a sum or a difference: XLA's exp and tanh are good to a few of them.
FLOAT32_UNITS = 8


class Kernel(NamedTuple):
    """A function, and the same one in 16 bits step by step.

    Attributes:
      fn: takes the activations and returns the result.
      naive: computes it with NumPy, which rounds after every operation.
      magnitude: the largest number that enters a sum, of the activations and result.
    """

    fn: Callable[..., Any]
    naive: Callable[..., Any]
    magnitude: Callable[[Any, Any], Any]


LABELS = np.arange(ROWS) % FEATURES


def _layer_norm(x):
    variables = {
        "params": {
            "scale": jnp.ones(FEATURES, x.dtype),
            "bias": jnp.zeros(FEATURES, x.dtype),
        }
    }
    return nn.LayerNorm().apply(variables, x)


def _naive_softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _naive_layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + np.asarray(1e-6, x.dtype))


def _naive_cross_entropy(x):
    top = x.max(-1, keepdims=True)
    total = np.log(np.exp(x - top).sum(-1)) + top[:, 0]
    return total - x[np.arange(ROWS), LABELS]


def _naive_gelu(x):
    half, root = np.asarray(0.5, x.dtype), np.asarray(np.sqrt(2 / np.pi), x.dtype)
    cubic = np.asarray(0.044715, x.dtype) * x * x * x
    return half * x * (np.asarray(1, x.dtype) + np.tanh(root * (x + cubic)))


def _naive_sinc(x):
    angle = np.asarray(np.pi, x.dtype) * x
    return np.where(x == 0, np.ones_like(x), np.sin(angle) / angle)


def _exp2(x):
    return jnp.exp2(jnp.clip(x, -12, 12))


def _naive_exp2(x):
    log_two, limit = np.asarray(np.log(2), x.dtype), np.asarray(12, x.dtype)
    return np.exp(log_two * np.maximum(np.minimum(x, limit), -limit))


KERNELS = {
    "softmax": Kernel(jax.nn.softmax, _naive_softmax, lambda x, y: np.abs(y).max()),
    "layer_norm": Kernel(_layer_norm, _naive_layer_norm, lambda x, y: np.abs(y).max()),
    "cross_entropy": Kernel(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
        _naive_cross_entropy,
        lambda x, y: np.maximum(np.abs(x).max(), np.abs(y).max()),
    ),
    "gelu": Kernel(jax.nn.gelu, _naive_gelu, lambda x, y: np.abs(x)),
    "sinc": Kernel(jnp.sinc, _naive_sinc, lambda x, y: np.ones(())),
    "exp2": Kernel(_exp2, _naive_exp2, lambda x, y: np.abs(y)),
}


def activations(scale, dtype):
    """Normal values that are exact in a 16-bit dtype."""
    rng = np.random.default_rng(0)
    return (scale * rng.standard_normal((ROWS, FEATURES))).astype(dtype)


def reference(kernel, x):
    """The result in float64."""
    with jax.enable_x64(True):
        return np.asarray(kernel.fn(jnp.asarray(x.astype(np.float64))))


def excess(result, expected, magnitude):
    """How far a result is beyond one rounding of float32's result, at worst."""
    info = jnp.finfo(result.dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(expected), float(info.tiny))))
    spacing = np.maximum(
        float(info.eps) * 2.0**exponent, float(info.smallest_subnormal)
    )
    rounding = np.zeros(()) if result.dtype == np.float32 else spacing / 2
    single = FLOAT32_UNITS * float(jnp.finfo(jnp.float32).eps) * magnitude
    return (np.abs(result.astype(np.float64) - expected) - rounding - single).max()


each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])


each_device = pytest.mark.parametrize("device", DEVICES)
each_scale = pytest.mark.parametrize("scale", SCALES)


def excess_under_autocast(fn, kernel, device, x, argument):
    """How far `fn`'s result is beyond one rounding of the kernel's on `x`."""
    options = {"device_type": device, "dtype": x.dtype}
    result = np.asarray(jamp.autocast(fn, **options)(jnp.asarray(argument)))
    assert result.dtype in (x.dtype, np.float32)
    expected = reference(kernel, x)
    return excess(result, expected, kernel.magnitude(x.astype(float), expected))


@each_kernel
@each_dtype
@each_device
@each_scale
def test_what_follows_a_matmul_is_rounded_once(kernel, dtype, device, scale):
    x = activations(scale, dtype)
    fn = lambda y: kernel.fn(y @ jnp.eye(FEATURES))  # noqa: E731 - 16-bit activations
    wide = x.astype(np.float32)
    assert excess_under_autocast(fn, kernel, device, x, wide) <= 0


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "cross_entropy"])
@each_dtype
@each_device
@each_scale
def test_a_16_bit_argument_is_rounded_once(name, dtype, device, scale):
    x = activations(scale, dtype)
    kernel = KERNELS[name]
    assert excess_under_autocast(kernel.fn, kernel, device, x, x) <= 0


def _gelu_with_16_bit_constants(x, dtype):
    root, cubic = (np.float64(dtype(c)) for c in (np.sqrt(2 / np.pi), 0.044715))
    return 0.5 * x * (1 + np.tanh(root * (x + cubic * x**3)))


@each_dtype
@each_device
@each_scale
def test_gelu_of_a_16_bit_argument_is_rounded_once_but_for_its_constants(
    dtype, device, scale
):
    # Its constants have the dtype of the argument in the very program that JAX traces.
    x = activations(scale, dtype)
    options = {"device_type": device, "dtype": x.dtype}
    result = np.asarray(jamp.autocast(jax.nn.gelu, **options)(jnp.asarray(x)))
    expected = _gelu_with_16_bit_constants(x.astype(float), dtype)
    assert excess(result, expected, np.abs(x.astype(float))) <= 0


@each_kernel
@each_dtype
def test_the_same_steps_in_16_bits_are_not_as_accurate(kernel, dtype):
    x = activations(1.0, dtype)
    result = kernel.naive(x)
    assert result.dtype == dtype
    expected = reference(kernel, x)
    np.testing.assert_allclose(result.astype(float), expected, atol=0.2)
    assert excess(result, expected, kernel.magnitude(x.astype(float), expected)) > 0


def test_rounding_to_the_wrong_neighbour_is_found():
    x = np.array([1 + 2.0**-11 + 2.0**-13])  # just above the middle of two float16
    below, above = np.ones(1, np.float16), np.full(1, 1 + 2.0**-10, np.float16)
    assert excess(above, x, 0.0) <= 0 < excess(below, x, 0.0)


@each_device
def test_a_density_of_several_variables_is_that_of_float32(device):
    rng = np.random.default_rng(0)
    x, mean, factor = (rng.standard_normal(shape) for shape in ((16, 4), 4, (4, 4)))
    arguments = (x, mean, factor @ factor.T + np.eye(4))
    arguments = [jnp.asarray(argument, jnp.float32) for argument in arguments]
    logpdf = jax.scipy.stats.multivariate_normal.logpdf
    found = jamp.autocast(logpdf, device_type=device)(*arguments)
    np.testing.assert_allclose(found, logpdf(*arguments), rtol=1e-5)
