"""Norms, as people and libraries write them."""

import jax
import jax.numpy as jnp
from jax import lax

from ._idiom import Table, bias, normal, scale

NORMS = Table()
add = NORMS.add


@add(scale(32), bias(32))
def layer_norm_by_mean_and_var(x, g, b):
    mu = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return g * (x - mu) / jnp.sqrt(var + 1e-5) + b


@add(scale(32), bias(32))
def layer_norm_by_squares(x, g, b):
    mu = x.mean(-1, keepdims=True)
    var = ((x - mu) ** 2).mean(-1, keepdims=True)
    return (x - mu) * lax.rsqrt(var + 1e-6) * g + b


@add(scale(32), bias(32))
def layer_norm_fast_variance(x, g, b):
    """As flax's `use_fast_variance`."""
    mu = jnp.mean(x, -1, keepdims=True)
    mu2 = jnp.mean(lax.square(x), -1, keepdims=True)
    var = jnp.maximum(0.0, mu2 - lax.square(mu))
    return (x - mu) * (lax.rsqrt(var + 1e-6) * g) + b


@add(scale(32), bias(32))
def layer_norm_by_std(x, g, b):
    mean = x.mean(axis=-1, keepdims=True)
    std = x.std(axis=-1, keepdims=True)
    return g * (x - mean) / (std + 1e-6) + b


@add(scale(32), bias(32))
def layer_norm_by_sums(x, g, b):
    n = x.shape[-1]
    mu = jnp.sum(x, -1, keepdims=True) / n
    d = x - mu
    var = jnp.sum(d * d, -1, keepdims=True) / n
    return d / jnp.sqrt(var + 1e-5) * g + b


@add(scale(32), bias(32))
def layer_norm_centred_dot(x, g, b):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g + b


@add(scale(32), bias(32))
def layer_norm_haiku(x, g, b):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    g = jnp.broadcast_to(g, x.shape)
    b = jnp.broadcast_to(b, x.shape)
    mean = jnp.broadcast_to(mean, x.shape)
    inv = g * lax.rsqrt(variance + 1e-5)
    return inv * (x - mean) + b


@add(scale(32), bias(32))
def layer_norm_equinox(x, g, b):
    def one(x):
        mean = jnp.mean(x, keepdims=True)
        variance = jnp.var(x, keepdims=True)
        variance = jnp.maximum(0.0, variance)
        inv = lax.rsqrt(variance + 1e-5)
        return (x - mean) * inv * g + b

    return jax.vmap(one)(x)


@add()
def layer_norm_without_parameters(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


@add(bias(32), bias(32))
def adaptive_layer_norm(x, shift, gain):
    mu = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x - mu), -1, keepdims=True)
    return (x - mu) / jnp.sqrt(var + 1e-6) * (1 + gain) + shift


@add(scale(32))
def rms_norm_llama(x, g):
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return g * (x * lax.rsqrt(variance + 1e-6))


@add(scale(32))
def rms_norm_by_power(x, g):
    variance = jnp.power(x, 2).mean(-1, keepdims=True)
    return g * (x / jnp.sqrt(variance + 1e-6))


@add(scale(32))
def rms_norm_by_sum(x, g):
    ss = jnp.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return x * (1.0 / jnp.sqrt(ss + 1e-5)) * g


@add(scale(32))
def rms_norm_by_einsum(x, g):
    ss = jnp.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    return x * lax.rsqrt(ss + 1e-6) * g


@add(bias(32))
def rms_norm_gemma(x, g):
    var = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * jnp.reciprocal(jnp.sqrt(var + 1e-6)) * (1 + g)


@add(scale(32))
def rms_norm_minus_half(x, g):
    return x * (jnp.mean(x**2, -1, keepdims=True) + 1e-6) ** -0.5 * g


@add(scale(32))
def rms_norm_over_root_d(x, g):
    norm = jnp.sqrt(jnp.sum(x**2, -1, keepdims=True))
    return x / jnp.maximum(norm * x.shape[-1] ** -0.5, 1e-8) * g


@add(scale(16), bias(16), x=(2, 6, 6, 16))
def group_norm(x, g, b):
    n, h, w, c = x.shape
    y = x.reshape(n, h, w, 4, c // 4)
    mean = y.mean((1, 2, 4), keepdims=True)
    var = y.var((1, 2, 4), keepdims=True)
    y = (y - mean) / jnp.sqrt(var + 1e-5)
    return y.reshape(x.shape) * g + b


@add(scale(16), bias(16), x=(2, 6, 6, 16))
def group_norm_fast_variance(x, g, b):
    y = x.reshape(2, 36, 4, 4)
    mean = jnp.mean(y, (1, 3), keepdims=True)
    var = jnp.mean(y * y, (1, 3), keepdims=True) - mean * mean
    y = (y - mean) * lax.rsqrt(jnp.maximum(var, 0) + 1e-5)
    return y.reshape(x.shape) * g + b


@add(scale(16), bias(16), bias(16), scale(16), x=(16, 3, 3, 16))
def batch_norm_training(x, g, b, running_mean, running_var):
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.var(x, (0, 1, 2))
    y = (x - mean) / jnp.sqrt(var + 1e-5) * g + b
    return (
        y,
        0.9 * running_mean + 0.1 * mean,
        0.9 * running_var + 0.1 * var,
    )


@add(scale(16), bias(16), bias(16), scale(16), x=(16, 3, 3, 16))
def batch_norm_fast_variance(x, g, b, running_mean, running_var):
    mean = x.mean((0, 1, 2))
    var = (x**2).mean((0, 1, 2)) - mean**2
    inv = lax.rsqrt(var + 1e-5) * g
    y = x * inv + (b - mean * inv)
    return (
        y,
        running_mean + 0.1 * (mean - running_mean),
        running_var + 0.1 * (var - running_var),
    )


@add(scale(16), bias(16), normal(16, mean=20.0), scale(16), x=(16, 3, 3, 16))
def batch_norm_inference(x, g, b, running_mean, running_var):
    return (x - running_mean) * lax.rsqrt(running_var + 1e-5) * g + b


@add(scale(16), bias(16), x=(2, 6, 6, 16))
def instance_norm(x, g, b):
    mean = jnp.mean(x, (1, 2), keepdims=True)
    var = jnp.mean((x - mean) ** 2, (1, 2), keepdims=True)
    return g * (x - mean) / jnp.sqrt(var + 1e-5) + b


@add()
def l2_normalise(x):
    return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True))


@add()
def l2_normalise_with_floor(x):
    return x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True)), 1e-12)


@add()
def unit_vectors_by_rsqrt(x):
    return x * lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), 1e-12))


@add()
def l2_normalise_by_norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@add(scale(8))
def scale_norm(x, g):
    return g[:, None] * x / (jnp.sqrt((x**2).sum(-1, keepdims=True)) + 1e-5)


@add(normal(32, 16), scale(16))
def weight_norm(x, v, g):
    w = g * v / jnp.sqrt(jnp.sum(v**2, 0))
    return x @ w


@add(normal(32, 16), normal(16))
def spectral_norm(x, w, u):
    v = w @ u
    v = v / jnp.sqrt(jnp.sum(v**2) + 1e-12)
    u = w.T @ v
    u = u / jnp.sqrt(jnp.sum(u**2) + 1e-12)
    v, u = lax.stop_gradient((v, u))
    sigma = v @ w @ u
    return x @ (w / sigma)


@add(x=(2, 8, 32))
def cosine_similarity(x):
    a, b = x
    dot = jnp.sum(a * b, -1)
    return dot / (jnp.sqrt(jnp.sum(a * a, -1)) * jnp.sqrt(jnp.sum(b * b, -1)) + 1e-8)


@add(x=(2, 8, 32))
def cosine_similarity_of_unit_vectors(x):
    a, b = x / jnp.maximum(jnp.sqrt((x * x).sum(-1, keepdims=True)), 1e-8)
    return (a * b).sum(-1)


@add(x=(64, 8))
def standardise_columns(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-8)


@add(x=(64, 8))
def minmax_columns(x):
    low, high = x.min(0), x.max(0)
    return (x - low) / (high - low + 1e-8)


@add(x=(64, 8))
def whiten_columns(x):
    centred = x - jnp.sum(x, 0) / x.shape[0]
    variance = jnp.sum(centred * centred, 0) / (x.shape[0] - 1)
    return centred / jnp.sqrt(variance + 1e-5)


@add(scale(16), bias(16), x=(2, 6, 6, 16))
def global_response_norm(x, g, b):
    gx = jnp.sqrt(jnp.sum(x**2, axis=(1, 2), keepdims=True) + 1e-6)
    nx = gx / (gx.mean(-1, keepdims=True) + 1e-6)
    return g * (x * nx) + b + x


@add(x=(2, 6, 6, 16))
def pixel_norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-8)


@add(x=(2, 6, 6, 16))
def local_response_norm(x):
    padded = jnp.pad(x**2, ((0, 0),) * 3 + ((2, 2),))
    near = sum(padded[..., i : i + x.shape[-1]] for i in range(5))
    return x / (2 + 1e-4 * near) ** 0.75


@add(normal(16, std=3.0), x=(8, 16))
def gradient_clipping_by_norm(x, other):
    norm = jnp.sqrt(jnp.sum(x**2) + jnp.sum(other**2))
    factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    return x * factor, other * factor
