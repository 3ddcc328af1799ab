"""Networks for images: convolutions of all sorts, mixers, generators."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from small_networks._network import (
    Block,
    Network,
    classifier,
    cross_entropy,
    integers,
    normal,
    normed,
    of_module,
)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(256, (8, 8), (8, 8))(x).reshape(x.shape[0], -1, 256)
        for _ in range(4):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(256)(y)))
            x = x + y.swapaxes(1, 2)
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


class Video(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64, 128):
            x = nn.relu(normed(nn.Conv(features, (3, 3, 3))(x)))
            x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
        return nn.Dense(10)(x.mean((1, 2, 3)))


class DenseNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3))(x)
        for _ in range(3):
            for _ in range(4):
                y = nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(8)(x)))
                x = jnp.concatenate([x, y], axis=-1)
            x = nn.avg_pool(nn.Conv(x.shape[-1] // 2, (1, 1))(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


class MobileNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.hard_swish(normed(nn.Conv(16, (3, 3), (2, 2))(x)))
        for features, stride in ((24, 2), (24, 1), (40, 2), (40, 1), (80, 2), (80, 1)):
            wide = 4 * x.shape[-1]
            y = nn.relu6(normed(nn.Conv(wide, (1, 1))(x)))
            strides = (stride, stride)
            y = nn.Conv(wide, (3, 3), strides, feature_group_count=wide)(y)
            y = normed(nn.Conv(features, (1, 1))(nn.relu6(normed(y))))
            x = x + y if x.shape == y.shape else y
        return nn.Dense(100)(x.mean((1, 2)))


class Autoencoder(nn.Module):
    """A variational one."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        for features in (32, 64, 128):
            x = nn.relu(nn.Conv(features, (4, 4), (2, 2))(x))
        x = x.reshape(x.shape[0], -1)
        mean, log_variance = nn.Dense(64)(x), nn.Dense(64)(x)
        z = mean + jnp.exp(log_variance / 2) * normal(*mean.shape)
        x = nn.relu(nn.Dense(4 * 4 * 128)(z)).reshape(-1, 4, 4, 128)
        for features in (64, 32):
            x = nn.relu(nn.ConvTranspose(features, (4, 4), (2, 2))(x))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(x), mean, log_variance


class Generator(nn.Module):
    """One as StyleGAN's, each of whose pictures has weights of its own."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        for _ in range(3):
            z = nn.leaky_relu(nn.Dense(128)(z), 0.2)
        ones = nn.initializers.normal(1.0)
        x = self.param("constant", ones, (1, 4, 4, 128))
        x = jnp.broadcast_to(x, (z.shape[0], *x.shape[1:]))
        for layer in range(4):
            count, height, width, features = x.shape
            style = nn.Dense(features)(z) + 1
            kernel = self.param(
                f"kernel_{layer}", nn.initializers.normal(0.05), (3, 3, features, 128)
            )
            kernels = kernel * style[:, None, None, :, None]
            power = jnp.sum(kernels**2, axis=(1, 2, 3), keepdims=True)
            kernels = kernels * lax.rsqrt(power + 1e-8)
            shape = count, 2 * height, 2 * width, features
            x = jax.vmap(convolve)(jax.image.resize(x, shape, "bilinear"), kernels)
            noise = normal(*x.shape[:3], 1, seed=layer)
            x = nn.leaky_relu(x + 0.1 * noise, 0.2)
        return nn.Dense(3)(x)


def convolve(picture: jax.Array, kernel: jax.Array) -> jax.Array:
    dimensions = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(
        picture[None], kernel, (1, 1), "SAME", dimension_numbers=dimensions
    )[0]


class DiffusionTransformer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        waves = time[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(64) / 64)
        waves = jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], axis=-1)
        context = nn.silu(nn.Dense(256)(nn.silu(nn.Dense(256)(waves))))
        x = nn.Dense(256)(x)
        for _ in range(4):
            parts = nn.Dense(6 * 256)(context)[:, None]
            scale, shift, gate, *more = jnp.split(parts, 6, axis=-1)
            y = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
            x = x + gate * nn.MultiHeadDotProductAttention(4)(y, y)
            scale, shift, gate = more
            y = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
            x = x + gate * nn.Dense(256)(nn.gelu(nn.Dense(1024)(y)))
        return nn.Dense(16)(x)


class ImagesAndTexts(nn.Module):
    """A contrastive model of both, as CLIP."""

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        x = nn.Conv(192, (8, 8), (8, 8))(images).reshape(images.shape[0], -1, 192)
        y = nn.Embed(3000, 192)(tokens)
        for _ in range(2):
            x, y = Block(192, 3, 0.0)(x), Block(192, 3, 0.0)(y)
        both = nn.Dense(128)(x.mean(1)), nn.Dense(128)(y[:, 0])
        a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in both)
        temperature = self.param("temperature", nn.initializers.constant(2.6), ())
        return jnp.exp(temperature) * a @ b.T


def mixer() -> Network:
    return classifier(Mixer(), normal(16, 64, 64, 3), 10)


def video() -> Network:
    return classifier(Video(), normal(2, 16, 32, 32, 3), 10)


def densenet() -> Network:
    return classifier(DenseNet(), normal(8, 32, 32, 3), 10)


def mobilenet() -> Network:
    return classifier(MobileNet(), normal(8, 96, 96, 3), 100)


def autoencoder() -> Network:
    images = jax.nn.sigmoid(normal(32, 32, 32, 3))

    def loss(outputs: Any) -> jax.Array:
        found, mean, log_variance = outputs
        wrong = jnp.sum((found - images) ** 2, axis=(1, 2, 3))
        spread = 1 + log_variance - mean**2 - jnp.exp(log_variance)
        return jnp.mean(wrong) - jnp.mean(jnp.sum(spread, axis=-1)) / 2

    return of_module(Autoencoder(), images, loss=loss)


def generator() -> Network:
    model = Generator()
    return of_module(model, normal(4, 128), loss=lambda y: nn.softplus(-y).mean())


def diffusion_transformer() -> Network:
    return of_module(DiffusionTransformer(), normal(8, 64, 16), jnp.linspace(0, 1, 8))


def images_and_texts() -> Network:
    def loss(scores: jax.Array) -> jax.Array:
        labels = jnp.arange(len(scores))
        return cross_entropy(scores, labels) + cross_entropy(scores.T, labels)

    inputs = normal(16, 64, 64, 3), integers(3000, 16, 32)
    return of_module(ImagesAndTexts(), *inputs, loss=loss)
