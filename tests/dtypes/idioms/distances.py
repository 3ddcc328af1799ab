"""Distances, kernels and attention by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ._idiom import Table, bias, normal, scale

DISTANCES = Table()
add = DISTANCES.add

CAUSAL = np.tril(np.ones((12, 12), bool))


@add(x=(2, 8, 32))
def squared_distances_direct(x):
    a, b = x
    return jnp.sum((a[:, None] - b[None]) ** 2, -1)


@add(normal(8, 32))
def squared_distances_to_centres(x, centres):
    diff = x[:, None, :] - centres[None, :, :]
    return (diff * diff).sum(-1)


@add(normal(8, 32))
def squared_distances_by_expansion(x, centres):
    cross = x @ centres.T
    return (x**2).sum(-1)[:, None] - 2 * cross + (centres**2).sum(-1)[None]


@add(normal(8, 32))
def codebook_distances(z, codebook):
    """As in vector quantisation."""
    d = (
        jnp.sum(z**2, 1, keepdims=True)
        + jnp.sum(codebook**2, 1)
        - 2 * jnp.einsum("bd,nd->bn", z, codebook)
    )
    return jax.nn.softmax(-d / 32.0)


@add(x=(2, 8, 32))
def euclidean(x):
    a, b = x
    return jnp.sqrt(jnp.sum(jnp.square(a - b), -1))


@add(x=(2, 8, 32))
def euclidean_by_power(x):
    a, b = x
    return jnp.sum((a - b) ** 2, -1) ** 0.5


@add(x=(2, 8, 32))
def manhattan(x):
    return jnp.sum(jnp.abs(x[0] - x[1]), -1)


@add(x=(2, 8, 32))
def cdist_with_floor(x):
    a, b = x
    sq = jnp.sum((a[:, None] - b[None]) ** 2, -1)
    return jnp.sqrt(jnp.maximum(sq, 1e-12))


@add(scale(32), bias(32))
def mahalanobis_diagonal(x, sigma, mu):
    return jnp.sqrt((((x - mu) / sigma) ** 2).sum(-1) + 1e-12)


@add(normal(32), normal(32, 32, std=0.2))
def mahalanobis(x, mu, precision):
    d = x - mu
    return jnp.einsum("bi,ij,bj->b", d, precision @ precision.T, d)


@add(x=(2, 8, 32))
def rbf_kernel(x):
    a, b = x / jnp.sqrt(jnp.mean(x**2) + 1e-6)
    return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1) / 64.0)


@add(normal(8, 32))
def rbf_features(x, centres):
    d2 = jnp.sum(jnp.square(x[:, None] - centres), -1)
    return jnp.exp(-0.5 * d2 / (d2.mean() + 1e-6))


@add(x=(2, 8, 32))
def cauchy_kernel(x):
    a, b = x
    return 1 / (1 + ((a[:, None] - b[None]) ** 2).sum(-1))


@add(x=(2, 8, 32))
def laplace_kernel(x):
    a, b = x
    d = jnp.abs(a[:, None] - b[None]).sum(-1)
    return jnp.exp(-d / (d.mean() + 1e-6))


@add(normal(4, 32))
def student_assignment(z, centres):
    """As in deep embedded clustering and t-SNE."""
    q = 1.0 / (1.0 + jnp.sum((z[:, None] - centres) ** 2, -1))
    return q / q.sum(1, keepdims=True)


@add(x=(3, 2, 12, 16))
def attention(x):
    q, k, v = x
    s = jnp.einsum("htd,hsd->hts", q, k) / math.sqrt(16)
    s = s - s.max(-1, keepdims=True)
    p = jnp.exp(s)
    p = p / p.sum(-1, keepdims=True)
    return jnp.einsum("hts,hsd->htd", p, v)


@add(CAUSAL, x=(3, 2, 12, 16))
def attention_causal(x, mask):
    q, k, v = x
    s = q @ k.swapaxes(-1, -2) * 16**-0.5
    s = jnp.where(mask, s, -1e9)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


@add(CAUSAL, x=(3, 2, 12, 16))
def attention_with_additive_mask(x, mask):
    q, k, v = x
    s = jnp.einsum("htd,hsd->hts", q * 16**-0.5, k)
    s = s + (1.0 - mask.astype(s.dtype)) * jnp.finfo(s.dtype).min
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("hts,hsd->htd", e / jnp.sum(e, -1, keepdims=True), v)


@add(CAUSAL, 0.7, x=(3, 2, 12, 16))
def attention_of_unit_vectors_with_temperature(x, mask, temperature):
    q, k, v = x
    q = q / jnp.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
    k = k / jnp.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    s = jnp.where(mask, q @ k.swapaxes(-1, -2) / temperature, -jnp.inf)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


@add(CAUSAL, x=(3, 2, 12, 16))
def attention_normalised_after(x, mask):
    q, k, v = x
    s = jnp.where(mask, jnp.einsum("htd,hsd->hts", q, k) / 4.0, -1e30)
    m = s.max(-1, keepdims=True)
    p = jnp.exp(s - m)
    return jnp.einsum("hts,hsd->htd", p, v) / p.sum(-1)[..., None]


@add(x=(3, 2, 12, 16))
def attention_with_capped_scores(x):
    q, k, v = x
    s = 50.0 * jnp.tanh(q @ k.swapaxes(-1, -2) / (4.0 * 50.0))
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


@add(x=(3, 2, 12, 16))
def attention_linear(x):
    q, k, v = x
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    kv = jnp.einsum("htd,hte->hde", k, v)
    z = 1 / (jnp.einsum("htd,hd->ht", q, k.sum(1)) + 1e-6)
    return jnp.einsum("htd,hde,ht->hte", q, kv, z)


@add(x=(3, 2, 12, 16))
def attention_online(x):
    """Block by block, as in flash attention."""
    q, k, v = x
    blocks = lambda y: y.reshape(2, 3, 4, 16).swapaxes(0, 1)  # noqa: E731

    def step(carry, block):
        m, total, out = carry
        k, v = block
        s = jnp.einsum("htd,hsd->hts", q, k) / 4.0
        top = jnp.maximum(m, s.max(-1))
        p, decay = jnp.exp(s - top[..., None]), jnp.exp(m - top)
        total = total * decay + p.sum(-1)
        out = out * decay[..., None] + jnp.einsum("hts,hsd->htd", p, v)
        return (top, total, out), None

    start = jnp.full((2, 12), -1e30), jnp.zeros((2, 12)), jnp.zeros((2, 12, 16))
    (_, total, out), _ = jax.lax.scan(step, start, (blocks(k), blocks(v)))
    return out / total[..., None]


@add(normal(2, 12, 12), x=(3, 2, 12, 16))
def attention_with_relative_bias(x, relative):
    q, k, v = x
    s = jnp.einsum("htd,hsd->hts", q, k) / 4.0 + relative
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("hts,hsd->htd", e / e.sum(-1, keepdims=True), v)


@add(x=(3, 2, 12, 16))
def attention_with_alibi(x):
    q, k, v = x
    slopes = 2.0 ** -jnp.arange(4.0, 9.0, 4.0)
    distance = jnp.arange(12) - jnp.arange(12)[:, None]
    s = jnp.einsum("htd,hsd->hts", q, k) / 4.0 + slopes[:, None, None] * distance
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("hts,hsd->htd", e / e.sum(-1, keepdims=True), v)


@add(x=(2, 8, 32))
def distance_in_hyperbolic_space(x):
    a, b = x
    d2 = ((a - b) ** 2).sum(-1)
    return jnp.arccosh(1 + 1e-3 * d2)


@add(x=(2, 8, 32))
def fisher_z_of_correlations(x):
    a, b = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.arctanh(0.99 * (a * b).sum(-1))
