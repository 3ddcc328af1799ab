"""Positions and times: sinusoids, rotations, biases of distance, Fourier features."""

import math

import jax.numpy as jnp
import numpy as np

from ._idiom import Table, normal

POSITIONS = Table()
add = POSITIONS.add

LENGTH, WIDTH = 2048, 8
TIMES = np.arange(LENGTH, dtype=np.float32)
FREQUENCIES = (10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32)
SEQUENCE = (LENGTH, WIDTH)


@add(x=SEQUENCE)
def sinusoids_vaswani(x):
    position = jnp.arange(LENGTH)[:, None]
    div = jnp.exp(jnp.arange(0, WIDTH, 2) * -(math.log(10000.0) / WIDTH))
    pe = jnp.zeros((LENGTH, WIDTH))
    pe = pe.at[:, 0::2].set(jnp.sin(position * div))
    pe = pe.at[:, 1::2].set(jnp.cos(position * div))
    return x + pe


@add(x=SEQUENCE)
def sinusoids_by_outer(x):
    inv = 1 / 10_000 ** (jnp.arange(0, WIDTH, 2) / WIDTH)
    angle = jnp.outer(jnp.arange(LENGTH), inv)
    return x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@add(x=SEQUENCE)
def sinusoids_by_matmul(x):
    inv = 1 / 10_000 ** (jnp.arange(0, WIDTH, 2) / WIDTH)
    angle = jnp.arange(LENGTH, dtype=jnp.float32)[:, None] @ inv[None]
    return x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@add(TIMES, x=SEQUENCE)
def sinusoids_of_an_argument(x, t):
    inv = jnp.exp(-math.log(10_000) * jnp.arange(0, WIDTH, 2) / WIDTH)
    angle = t[:, None] * inv
    return x + jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1).reshape(x.shape)


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def sinusoids_of_arguments_by_einsum(x, t, inv):
    angle = jnp.einsum("i,j->ij", t, inv)
    return x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def _halves(x, angle):
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@add(x=SEQUENCE)
def rotary_by_einsum(x):
    inv = 1.0 / (10_000 ** (jnp.arange(0, WIDTH, 2) / WIDTH))
    return _halves(x, jnp.einsum("i,j->ij", jnp.arange(LENGTH), inv))


@add(TIMES, x=SEQUENCE)
def rotary_by_outer(x, t):
    inv = 1.0 / (10_000 ** (jnp.arange(0, WIDTH, 2) / WIDTH))
    return _halves(x, jnp.outer(t, inv))


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def rotary_by_matmul(x, t, inv):
    return _halves(x, t[:, None] @ inv[None])


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def rotary_by_tensordot(x, t, inv):
    return _halves(x, jnp.tensordot(t, inv, axes=0))


@add(FREQUENCIES, x=SEQUENCE)
def rotary_by_numpy_positions(x, inv):
    return _halves(x, np.arange(LENGTH)[:, None] * inv)


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def rotary_rotate_half(x, t, inv):
    emb = jnp.concatenate([t[:, None] * inv] * 2, -1)
    a, b = jnp.split(x, 2, -1)
    return x * jnp.cos(emb) + jnp.concatenate([-b, a], -1) * jnp.sin(emb)


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def rotary_interleaved(x, t, inv):
    angle = jnp.einsum("t,f->tf", t, inv)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


@add(TIMES, FREQUENCIES, x=SEQUENCE)
def rotary_by_small_matrices(x, t, inv):
    angle = t[:, None] * inv
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    rotation = jnp.stack([jnp.stack([cos, -sin], -1), jnp.stack([sin, cos], -1)], -2)
    pairs = x.reshape(LENGTH, -1, 1, 2)
    return (rotation * pairs).sum(-1).reshape(x.shape)


@add(TIMES, FREQUENCIES, x=(16, WIDTH))
def rotary_from_a_table(x, t, inv):
    angle = jnp.outer(t, inv)
    table = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    sin, cos = jnp.split(table[-16:], 2, -1)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@add(TIMES, x=SEQUENCE)
def rotary_in_two_dimensions(x, t):
    inv = 1 / 100 ** (jnp.arange(2) / 2)
    row = jnp.einsum("...n,f->...nf", t // 64, inv)
    column = jnp.einsum("...n,f->...nf", t % 64, inv)
    return _halves(x, jnp.concatenate([row, column], -1))


@add(x=(4, 64, 8))
def alibi(q):
    slopes = 2.0 ** -jnp.arange(2.0, 9.0, 2.0)
    scores = jnp.einsum("htd,hsd->hts", q, q) / 8**0.5
    distance = jnp.arange(64)[None] - jnp.arange(64)[:, None]
    return scores + slopes[:, None, None] * distance


@add(-np.arange(2048, dtype=np.float32) * 0.25, normal(4, 2048), x=(16, 4))
def alibi_by_key(x, distances, keys):
    return x @ keys + distances


@add(normal(2, 32), x=(2, 64, 8))
def relative_bias_t5(q, table):
    relative = jnp.arange(64)[None] - jnp.arange(64)[:, None]
    n = jnp.abs(relative)
    large = 8 + (jnp.log(n / 8 + 1e-6) / math.log(128 / 8) * 8).astype(jnp.int32)
    bucket = jnp.where(n < 8, n, jnp.minimum(large, 15)) + 16 * (relative > 0)
    scores = jnp.einsum("htd,hsd->hts", q, q) / 8**0.5
    return scores + table[:, bucket]


@add(normal(8, 2, 15), x=(2, 8, 8))
def relative_bias_by_table(q, table):
    i = jnp.arange(8)[:, None] - jnp.arange(8)[None] + 7
    return jnp.einsum("htd,hsd->hts", q, q) + table.mean(0)[:, i]


@add(normal(64, 8), x=(4, 64, 8))
def learned_positions(x, table):
    return x + table


@add(np.array([0, 1, 250, 999], np.float32), x=(4, 16))
def time_embedding_of_diffusion(x, t):
    freqs = jnp.exp(-math.log(10_000) * jnp.arange(8) / 7)
    args = t[:, None] * freqs[None, :] * 1.0
    return x + jnp.concatenate([jnp.cos(args), jnp.sin(args)], -1)


@add(np.array([0, 1, 250, 999], np.float32), normal(4, 16), x=(4, 16))
def noised_sample(x, t, noise):
    betas = jnp.linspace(1e-4, 0.02, 1000)
    alpha_bar = jnp.cumprod(1 - betas)[t.astype(jnp.int32)][:, None]
    return jnp.sqrt(alpha_bar) * x + jnp.sqrt(1 - alpha_bar) * noise


@add(normal(16, 8, std=10.0), np.linspace(0, 1, 16, dtype=np.float32)[:, None])
def fourier_features(x, b, v):
    angle = 2 * jnp.pi * v * b
    feats = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    return x[0, :16] * feats


@add(normal(4, std=16.0), np.array([0.1, 0.5, 0.9], np.float32), x=(3, 8))
def gaussian_fourier_projection(x, w, t):
    angle = t[:, None] * w[None, :] * 2 * jnp.pi
    return x * jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@add(np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), x=(8, 30))
def nerf_encoding(x, points):
    bands = 2.0 ** jnp.arange(5) * jnp.pi
    angle = (points[..., None] * bands).reshape(8, -1)
    return x * jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@add(TIMES, normal(8), x=SEQUENCE)
def time_to_vector(x, t, w):
    """A linear time beside periodic ones."""
    v = t[:, None] * w
    return x + v.at[:, 1:].set(jnp.sin(v[:, 1:]))


@add(np.float32(1500), x=(4, 8))
def warmup_and_cosine(x, step):
    warm = jnp.minimum(step / 1000, 1.0)
    rate = 0.5 * warm * (1 + jnp.cos(jnp.pi * step / 10_000))
    return rate * x


@add(np.int32(20_000), x=(4, 8))
def bias_correction(x, step):
    """As Adam divides its means."""
    return x * (1 - 0.9) / (1 - 0.9999**step)


@add(np.linspace(0, 5, 64, dtype=np.float32), x=(4, 64))
def radial_basis(x, centres):
    d = jnp.abs(x) % 5.0
    return jnp.exp(-10.0 * (d - centres) ** 2)


@add(x=(4, 64))
def cosine_cutoff(x):
    d = jnp.abs(x)
    return jnp.where(d < 5.0, 0.5 * (jnp.cos(jnp.pi * d / 5.0) + 1), 0.0)
