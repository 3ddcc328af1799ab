"""Sums, extremes, norms, softmax, cumulative functions, statistics and distances."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._case import OpCase, ascending, normal, positive

_X = (normal(4, 8),)
_ODD = (normal(4, 7),)
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

_EXTREMES = (
    OpCase("amax", lambda x: jnp.max(x, axis=-1), _X, "jnp.max(x, axis=-1)"),
    OpCase("amin", lambda x: jnp.min(x, axis=-1), _X, "jnp.min(x, axis=-1)"),
    OpCase("argmax", lambda x: jnp.argmax(x, axis=-1), _X, "jnp.argmax(x, axis=-1)"),
    OpCase("sort", jnp.sort, _X, "jnp.sort(x)", index=(0,)),
    OpCase("argsort", jnp.argsort, _X, "jnp.argsort(x)"),
    OpCase("topk", lambda x: lax.top_k(x, 3), _X, "lax.top_k(x, 3)"),
)

_CUMULATIVE = (
    OpCase("diff", jnp.diff, _X, "jnp.diff(x)"),
    OpCase("trapezoid", jnp.trapezoid, _X, "jnp.trapezoid(x)"),
    OpCase(
        "cumulative_trapezoid",
        lambda x: jnp.cumsum((x[:, 1:] + x[:, :-1]) / 2, axis=1),
        _X,
        "jnp.cumsum((x[:, 1:] + x[:, :-1]) / 2, axis=1)",
    ),
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
        "pairwise_distance",
        lambda x, y: jnp.linalg.norm(x - y + 1e-6, axis=-1),
        _PAIR,
        "jnp.linalg.norm(x - y + 1e-6, axis=-1)",
    ),
    OpCase(
        "cosine_similarity",
        optax.losses.cosine_similarity,
        _PAIR,
        "optax.losses.cosine_similarity(x, y)",
    ),
)

_STATISTICS = (
    OpCase("mean", lambda x: jnp.mean(x, axis=-1), _X, "jnp.mean(x, axis=-1)"),
    OpCase(
        "var",
        lambda x: jnp.var(x, axis=-1, ddof=1),
        _X,
        "jnp.var(x, axis=-1, ddof=1)",
    ),
    OpCase(
        "std",
        lambda x: jnp.std(x, axis=-1, ddof=1),
        _X,
        "jnp.std(x, axis=-1, ddof=1)",
    ),
    OpCase("nansum", lambda x: jnp.nansum(x, axis=-1), _X, "jnp.nansum(x, axis=-1)"),
    OpCase("nanmean", lambda x: jnp.nanmean(x, axis=-1), _X, "jnp.nanmean(x, axis=-1)"),
    OpCase(
        "median",
        lambda x: jnp.median(x, axis=-1),
        _ODD,
        "jnp.median(x, axis=-1)",
        index=(0,),
    ),
    OpCase(
        "nanmedian",
        lambda x: jnp.nanmedian(x, axis=-1),
        _ODD,
        "jnp.nanmedian(x, axis=-1)",
        index=(0,),
    ),
    OpCase("cov", jnp.cov, _X, "jnp.cov(x)"),
    OpCase("corrcoef", jnp.corrcoef, _X, "jnp.corrcoef(x)"),
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

CASES = (*_SUMS, *_EXTREMES, *_CUMULATIVE, *_NORMS, *_DISTANCES, *_STATISTICS)
