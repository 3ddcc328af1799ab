"""Functions of one number at a time: arithmetic, powers, logarithms, activations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ._case import OpCase, normal, positive, unit

_X = (normal(4, 8),)
_POSITIVE = (positive(4, 8),)
_UNIT = (unit(4, 8),)
_PAIR = (normal(4, 8), normal(4, 8))
_POWER = (positive(4, 8), normal(4, 8))

_ARITHMETIC = (
    OpCase("add", lambda x, y: x + y, _PAIR, "x + y"),
    OpCase(
        "addcdiv",
        lambda x, a, b: x + 0.5 * a / b,
        (normal(4, 8), normal(4, 8), positive(4, 8)),
        "x + 0.5 * a / b",
    ),
    OpCase(
        "addcmul",
        lambda x, a, b: x + 0.5 * a * b,
        (normal(4, 8), normal(4, 8), normal(4, 8)),
        "x + 0.5 * a * b",
    ),
    OpCase("atan2", jnp.arctan2, _PAIR, "jnp.arctan2(x, y)"),
    OpCase("fmod", jnp.fmod, (normal(4, 8), positive(4, 8)), "jnp.fmod(x, y)"),
    OpCase("reciprocal", jnp.reciprocal, _POSITIVE, "jnp.reciprocal(x)"),
    OpCase("__rdiv__", lambda x: 2.0 / x, _POSITIVE, "2.0 / x"),
    OpCase("__rtruediv__", lambda x: 3.0 / x, _POSITIVE, "3.0 / x"),
    OpCase(
        "fake_quantize_per_tensor_affine",
        lambda x: (jnp.clip(jnp.round(x / 0.1) + 3, 0, 255) - 3) * 0.1,
        _X,
        "(jnp.clip(jnp.round(x / scale) + zero, 0, 255) - zero) * scale",
    ),
)

_POWERS = (
    OpCase("__pow__", lambda x, y: x**y, _POWER, "x**y"),
    OpCase("__rpow__", lambda x: 2.0**x, _X, "2.0**x"),
    OpCase("pow", jnp.power, _POWER, "jnp.power(x, y)"),
    OpCase("rsqrt", lax.rsqrt, _POSITIVE, "lax.rsqrt(x)"),
    OpCase("exp", jnp.exp, _X, "jnp.exp(x)"),
    OpCase("expm1", jnp.expm1, _X, "jnp.expm1(x)"),
    OpCase("log", jnp.log, _POSITIVE, "jnp.log(x)"),
    OpCase("log10", jnp.log10, _POSITIVE, "jnp.log10(x)"),
    OpCase("log1p", jnp.log1p, _POSITIVE, "jnp.log1p(x)"),
    OpCase("log2", jnp.log2, _POSITIVE, "jnp.log2(x)"),
)

_TRIGONOMETRY = (
    OpCase("acos", jnp.arccos, _UNIT, "jnp.arccos(x)"),
    OpCase("asin", jnp.arcsin, _UNIT, "jnp.arcsin(x)"),
    OpCase("cosh", jnp.cosh, _X, "jnp.cosh(x)"),
    OpCase("sinh", jnp.sinh, _X, "jnp.sinh(x)"),
    OpCase("tan", jnp.tan, _UNIT, "jnp.tan(x)"),
    OpCase("erfinv", jax.scipy.special.erfinv, _UNIT, "jax.scipy.special.erfinv(x)"),
)

_ACTIVATIONS = (
    OpCase("relu", jax.nn.relu, _X, "jax.nn.relu(x)"),
    OpCase(
        "prelu",
        lambda x, a: nn.PReLU().apply({"params": {"negative_slope": a}}, x),
        (normal(4, 8), normal()),
        "nn.PReLU()(x)",
    ),
    OpCase("elu", jax.nn.elu, _X, "jax.nn.elu(x)"),
    OpCase("selu", jax.nn.selu, _X, "jax.nn.selu(x)"),
    OpCase("celu", jax.nn.celu, _X, "jax.nn.celu(x)"),
    OpCase("gelu", jax.nn.gelu, _X, "jax.nn.gelu(x)"),
    OpCase("glu", jax.nn.glu, _X, "jax.nn.glu(x)"),
    OpCase("softplus", jax.nn.softplus, _X, "jax.nn.softplus(x)"),
    OpCase("log_sigmoid", jax.nn.log_sigmoid, _X, "jax.nn.log_sigmoid(x)"),
    OpCase("hardsigmoid", jax.nn.hard_sigmoid, _X, "jax.nn.hard_sigmoid(x)"),
    OpCase("hardswish", jax.nn.hard_swish, _X, "jax.nn.hard_swish(x)"),
    OpCase(
        "hardshrink",
        lambda x: jnp.where(jnp.abs(x) > 0.5, x, 0.0),
        _X,
        "jnp.where(jnp.abs(x) > 0.5, x, 0.0)",
    ),
    OpCase(
        "softshrink",
        lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0),
        _X,
        "jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0.0)",
    ),
)

CASES = (*_ARITHMETIC, *_POWERS, *_TRIGONOMETRY, *_ACTIVATIONS)
