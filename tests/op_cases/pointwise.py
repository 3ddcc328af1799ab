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
_DIVIDED = (normal(4, 8), positive(4, 8))

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
    OpCase("sub", lambda x, y: x - y, _PAIR, "x - y"),
    OpCase("mul", lambda x, y: x * y, _PAIR, "x * y"),
    OpCase("div", lambda x, y: x / y, _DIVIDED, "x / y"),
    OpCase("floor_divide", lambda x, y: x // y, _DIVIDED, "x // y"),
    OpCase("remainder", lambda x, y: x % y, _DIVIDED, "x % y"),
    OpCase("lerp", lambda x, y: x + 0.25 * (y - x), _PAIR, "x + 0.25 * (y - x)"),
    OpCase("hypot", jnp.hypot, _PAIR, "jnp.hypot(x, y)"),
    OpCase("atan2", jnp.arctan2, _PAIR, "jnp.arctan2(x, y)"),
    OpCase("fmod", jnp.fmod, _DIVIDED, "jnp.fmod(x, y)"),
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

_SELECTIONS = (
    OpCase("maximum", jnp.maximum, _PAIR, "jnp.maximum(x, y)"),
    OpCase("minimum", jnp.minimum, _PAIR, "jnp.minimum(x, y)"),
    OpCase("fmax", jnp.fmax, _PAIR, "jnp.fmax(x, y)"),
    OpCase("clamp", lambda x: jnp.clip(x, -0.5, 0.5), _X, "jnp.clip(x, -0.5, 0.5)"),
    OpCase(
        "where", lambda x, y: jnp.where(x > 0, x, y), _PAIR, "jnp.where(x > 0, x, y)"
    ),
    OpCase(
        "masked_fill",
        lambda x: jnp.where(x > 0, -1.0, x),
        _X,
        "jnp.where(x > 0, -1.0, x)",
    ),
    OpCase("nan_to_num", jnp.nan_to_num, _X, "jnp.nan_to_num(x)"),
    OpCase("heaviside", jnp.heaviside, _PAIR, "jnp.heaviside(x, y)"),
    OpCase("copysign", jnp.copysign, _PAIR, "jnp.copysign(x, y)"),
    OpCase("sign", jnp.sign, _X, "jnp.sign(x)"),
    OpCase("abs", jnp.abs, _X, "jnp.abs(x)"),
    OpCase("neg", jnp.negative, _X, "-x"),
)

_ROUNDINGS = (
    OpCase("floor", jnp.floor, _X, "jnp.floor(x)"),
    OpCase("ceil", jnp.ceil, _X, "jnp.ceil(x)"),
    OpCase("round", jnp.round, _X, "jnp.round(x)"),
    OpCase("trunc", jnp.trunc, _X, "jnp.trunc(x)"),
    OpCase("frac", lambda x: x - jnp.trunc(x), _X, "x - jnp.trunc(x)"),
)

_POWERS = (
    OpCase("sqrt", jnp.sqrt, _POSITIVE, "jnp.sqrt(x)"),
    OpCase("square", jnp.square, _X, "jnp.square(x)"),
    OpCase("exp2", jnp.exp2, _X, "jnp.exp2(x)"),
    OpCase("logaddexp", jnp.logaddexp, _PAIR, "jnp.logaddexp(x, y)"),
    OpCase("logaddexp2", jnp.logaddexp2, _PAIR, "jnp.logaddexp2(x, y)"),
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
    OpCase("sin", jnp.sin, _X, "jnp.sin(x)"),
    OpCase("cos", jnp.cos, _X, "jnp.cos(x)"),
    OpCase("sinc", jnp.sinc, _X, "jnp.sinc(x)"),
    OpCase("atan", jnp.arctan, _X, "jnp.arctan(x)"),
    OpCase("asinh", jnp.arcsinh, _X, "jnp.arcsinh(x)"),
    OpCase("acosh", lambda x: jnp.arccosh(x + 1), _POSITIVE, "jnp.arccosh(x)"),
    OpCase("atanh", jnp.arctanh, _UNIT, "jnp.arctanh(x)"),
    OpCase("deg2rad", jnp.deg2rad, _X, "jnp.deg2rad(x)"),
    OpCase("rad2deg", jnp.rad2deg, _X, "jnp.rad2deg(x)"),
)

_ACTIVATIONS = (
    OpCase("sigmoid", jax.nn.sigmoid, _X, "jax.nn.sigmoid(x)"),
    OpCase("tanh", jnp.tanh, _X, "jnp.tanh(x)"),
    OpCase("silu", jax.nn.silu, _X, "jax.nn.silu(x)"),
    OpCase("mish", jax.nn.mish, _X, "jax.nn.mish(x)"),
    OpCase("relu6", jax.nn.relu6, _X, "jax.nn.relu6(x)"),
    OpCase("hardtanh", jax.nn.hard_tanh, _X, "jax.nn.hard_tanh(x)"),
    OpCase("leaky_relu", jax.nn.leaky_relu, _X, "jax.nn.leaky_relu(x)"),
    OpCase("softsign", jax.nn.soft_sign, _X, "jax.nn.soft_sign(x)"),
    OpCase("tanhshrink", lambda x: x - jnp.tanh(x), _X, "x - jnp.tanh(x)"),
    OpCase(
        "threshold",
        lambda x: jnp.where(x > 0.5, x, 0.0),
        _X,
        "jnp.where(x > 0.5, x, 0.0)",
    ),
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

CASES = (
    *_ARITHMETIC,
    *_SELECTIONS,
    *_ROUNDINGS,
    *_POWERS,
    *_TRIGONOMETRY,
    *_ACTIVATIONS,
)
