"""Sums, norms, softmax, cumulative functions, quantiles and distances."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._case import OpCase, ascending, normal, positive

_X = (normal(4, 8),)
_PAIR = (normal(4, 8), normal(4, 8))


def _normalize(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _renorm(x):
    norms = jnp.linalg.norm(x, axis=1, keepdims=True)
    return x * jnp.minimum(1.0, 2.0 / norms)


def _pdist(x):
    i, j = np.triu_indices(len(x), 1)
    return jnp.linalg.norm(x[i] - x[j], axis=-1)


_SUMS = (
    OpCase("sum", lambda x: jnp.sum(x, axis=-1), _X, "jnp.sum(x, axis=-1)"),
    OpCase(
        "prod",
        lambda x: jnp.prod(x, axis=-1),
        (positive(4, 8),),
        "jnp.prod(x, axis=-1)",
    ),
    OpCase("trace", jnp.trace, (positive(6, 6),), "jnp.trace(x)"),
    OpCase(
        "logsumexp",
        lambda x: jax.nn.logsumexp(x, axis=-1),
        _X,
        "jax.nn.logsumexp(x, axis=-1)",
    ),
    OpCase("softmax", jax.nn.softmax, _X, "jax.nn.softmax(x)"),
    OpCase("softmin", lambda x: jax.nn.softmax(-x), _X, "jax.nn.softmax(-x)"),
    OpCase("log_softmax", jax.nn.log_softmax, _X, "jax.nn.log_softmax(x)"),
)

_CUMULATIVE = (
    OpCase("cumsum", lambda x: jnp.cumsum(x, axis=1), _X, "jnp.cumsum(x, axis=1)"),
    OpCase(
        "cumprod",
        lambda x: jnp.cumprod(x, axis=1),
        (positive(4, 8),),
        "jnp.cumprod(x, axis=1)",
    ),
    OpCase(
        "cummax",
        lambda x: lax.cummax(x, axis=1),
        _X,
        "lax.cummax(x, axis=1)",
        index=(0,),
    ),
    OpCase(
        "cummin",
        lambda x: lax.cummin(x, axis=1),
        _X,
        "lax.cummin(x, axis=1)",
        index=(0,),
    ),
    OpCase(
        "logcumsumexp",
        lambda x: lax.cumlogsumexp(x, axis=1),
        _X,
        "lax.cumlogsumexp(x, axis=1)",
    ),
)

_NORMS = (
    OpCase("norm", jnp.linalg.norm, _X, "jnp.linalg.norm(x)"),
    OpCase(
        "frobenius_norm",
        lambda x: jnp.linalg.norm(x, ord="fro"),
        _X,
        'jnp.linalg.norm(x, ord="fro")',
    ),
    OpCase(
        "nuclear_norm",
        lambda x: jnp.linalg.norm(x, ord="nuc"),
        _X,
        'jnp.linalg.norm(x, ord="nuc")',
        traces_16bit=False,
    ),
    OpCase(
        "linalg_matrix_norm", jnp.linalg.matrix_norm, _X, "jnp.linalg.matrix_norm(x)"
    ),
    OpCase(
        "normalize",
        _normalize,
        _X,
        "x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)",
    ),
    OpCase(
        "renorm",
        _renorm,
        _X,
        "x * jnp.minimum(1.0, 2.0 / jnp.linalg.norm(x, axis=1, keepdims=True))",
    ),
)

_DISTANCES = (
    OpCase(
        "dist", lambda x, y: jnp.linalg.norm(x - y), _PAIR, "jnp.linalg.norm(x - y)"
    ),
    OpCase(
        "cdist",
        lambda x, y: jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)),
        (normal(5, 8), normal(6, 8)),
        "jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))",
    ),
    OpCase(
        "pdist",
        _pdist,
        (normal(5, 8),),
        "jnp.linalg.norm(x[i] - x[j], axis=-1)  # i, j = np.triu_indices(len(x), 1)",
    ),
    OpCase(
        "cosine_similarity",
        optax.losses.cosine_similarity,
        _PAIR,
        "optax.losses.cosine_similarity(x, y)",
    ),
)

_STATISTICS = (
    OpCase(
        "quantile",
        lambda x: jnp.quantile(x, 0.3, axis=-1),
        _X,
        "jnp.quantile(x, 0.3, axis=-1)",
    ),
    OpCase(
        "nanquantile",
        lambda x: jnp.nanquantile(x, 0.3, axis=-1),
        _X,
        "jnp.nanquantile(x, 0.3, axis=-1)",
    ),
    OpCase(
        "histc",
        lambda x: jnp.histogram(x, bins=8, range=(-3.0, 3.0))[0],
        _X,
        "jnp.histogram(x, bins=8, range=(-3.0, 3.0))[0]",
    ),
    OpCase(
        "searchsorted",
        jnp.searchsorted,
        (ascending(8), normal(5)),
        "jnp.searchsorted(a, v)",
    ),
)

CASES = (*_SUMS, *_CUMULATIVE, *_NORMS, *_DISTANCES, *_STATISTICS)
