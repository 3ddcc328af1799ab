"""The U-Net of diffusion models in Flax nnx, with attention (Ho et al. 2020)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ._task import STEPS, Task, drawn

SIZE, WIDTH, GROUPS = 16, 16, 4


def time_embedding(t, dim=WIDTH):
    rates = jnp.exp(-np.log(10000) * jnp.arange(dim // 2) / (dim // 2))
    angles = t[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def conv(inputs, outputs, rngs, stride=1, size=3):
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, rngs=rngs)


class Residual(nnx.Module):
    """Two convolutions that know the time, beside a shortcut."""

    def __init__(self, inputs, outputs, rngs):
        self.norm_1 = nnx.GroupNorm(inputs, num_groups=GROUPS, rngs=rngs)
        self.conv_1 = conv(inputs, outputs, rngs)
        self.time = nnx.Linear(4 * WIDTH, outputs, rngs=rngs)
        self.norm_2 = nnx.GroupNorm(outputs, num_groups=GROUPS, rngs=rngs)
        self.conv_2 = conv(outputs, outputs, rngs)
        self.shortcut = conv(inputs, outputs, rngs, size=1)

    def __call__(self, x, time):
        y = self.conv_1(nnx.silu(self.norm_1(x)))
        y = y + self.time(nnx.silu(time))[:, None, None]
        y = self.conv_2(nnx.silu(self.norm_2(y)))
        return self.shortcut(x) + y


class Attention(nnx.Module):
    """Self-attention over all places of a feature map."""

    def __init__(self, channels, rngs):
        self.norm = nnx.GroupNorm(channels, num_groups=GROUPS, rngs=rngs)
        self.qkv = nnx.Linear(channels, 3 * channels, rngs=rngs)
        self.out = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x):
        batch, height, width, channels = x.shape
        places = self.norm(x).reshape(batch, height * width, channels)
        q, k, v = jnp.split(self.qkv(places), 3, axis=-1)
        scores = jnp.einsum("bqc,bkc->bqk", q, k) * channels**-0.5
        y = jnp.einsum("bqk,bkc->bqc", nnx.softmax(scores, axis=-1), v)
        return x + self.out(y).reshape(x.shape)


class UNet(nnx.Module):
    """One step down, a middle with attention, one step up with a skip connection."""

    def __init__(self, rngs):
        self.time_1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.time_2 = nnx.Linear(4 * WIDTH, 4 * WIDTH, rngs=rngs)
        self.first = conv(1, WIDTH, rngs)
        self.high = Residual(WIDTH, WIDTH, rngs)
        self.down = conv(WIDTH, WIDTH, rngs, stride=2)
        self.low = Residual(WIDTH, 2 * WIDTH, rngs)
        self.attention = Attention(2 * WIDTH, rngs)
        self.middle = Residual(2 * WIDTH, 2 * WIDTH, rngs)
        self.up = conv(2 * WIDTH, WIDTH, rngs)
        self.joined = Residual(2 * WIDTH, WIDTH, rngs)
        self.norm = nnx.GroupNorm(WIDTH, num_groups=GROUPS, rngs=rngs)
        self.last = conv(WIDTH, 1, rngs)

    def __call__(self, x, t):
        time = self.time_2(nnx.silu(self.time_1(time_embedding(t))))
        high = self.high(self.first(x), time)
        low = self.attention(self.low(self.down(high), time))
        low = self.middle(low, time)
        shape = (*high.shape[:-1], low.shape[-1])
        up = self.up(jax.image.resize(low, shape, "nearest"))
        joined = self.joined(jnp.concatenate([up, high], axis=-1), time)
        return self.last(nnx.silu(self.norm(joined)))


def noise_loss(model, batch):
    """How well the noise in an image is told, as a mean squared error."""
    images, noise, t = batch
    kept = jnp.cos(0.5 * np.pi * t / 1000)[:, None, None, None]
    noisy = kept * images + jnp.sqrt(1 - kept**2) * noise
    return jnp.mean((model(noisy, t) - noise) ** 2)


def blobs(rng, size=4):
    """Batches of round blobs, of the noise to add, and of times."""
    grid = np.linspace(-1, 1, SIZE)
    batches = []
    for _ in range(STEPS):
        x, y = rng.uniform(-0.6, 0.6, (2, size, 1, 1))
        distances = (grid[:, None] - y) ** 2 + (grid - x) ** 2
        images = 2 * np.exp(-distances / 0.1)[..., None] - 1
        noise = rng.standard_normal(images.shape)
        t = rng.uniform(50, 950, size)
        batches.append(tuple(a.astype(np.float32) for a in (images, noise, t)))
    return batches


def make_task() -> Task:
    """Denoising of blobs, by Adam."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: UNet(nnx.Rngs(4))))
    params = drawn(shapes, np.random.default_rng(4))

    def loss_fn(params, state, batch):
        return noise_loss(nnx.merge(graph, params), batch), state

    batches = blobs(np.random.default_rng(4))
    return Task(loss_fn, params, None, batches, optax.adam(2e-3))
