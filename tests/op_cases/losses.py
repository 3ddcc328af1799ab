"""Loss functions: optax where it has one, composed where it has not."""

import jax
import jax.numpy as jnp
import optax

from ._case import (
    OpCase,
    integer,
    log_probability,
    normal,
    positive,
    probability,
    sign,
    unit,
)

_PAIR = (normal(4, 8), normal(4, 8))
_LABELS = (normal(4, 8), integer(8, 4))


def _cosine_embedding(x, y, target):
    similarity = optax.losses.cosine_similarity(x, y)
    return jnp.where(target == 1, 1 - similarity, jax.nn.relu(similarity - 0.2)).mean()


def _ctc(logits, labels):
    frames = jnp.zeros(logits.shape[:2], logits.dtype)
    padding = jnp.zeros(labels.shape, logits.dtype)
    return optax.losses.ctc_loss(logits, frames, labels + 1, padding).mean()


def _multi_margin(x, y):
    margins = jax.nn.relu(1 - jnp.take_along_axis(x, y[:, None], axis=1) + x)
    others = jnp.arange(x.shape[1]) != y[:, None]
    return jnp.where(others, margins, 0.0).sum(axis=1).mean() / x.shape[1]


def _multilabel_margin(x, y):
    targets = jnp.take_along_axis(x, y, axis=1)
    margins = jax.nn.relu(1 - targets[:, :, None] + x[:, None, :])
    others = (jnp.arange(x.shape[1]) != y[:, :, None]).all(axis=1, keepdims=True)
    return jnp.where(others, margins, 0.0).sum(axis=(1, 2)).mean() / x.shape[1]


_CLASSES = (
    OpCase(
        "cross_entropy",
        lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y).mean(),
        _LABELS,
        "optax.softmax_cross_entropy_with_integer_labels(x, y).mean()",
    ),
    OpCase(
        "nll_loss",
        lambda logp, y: -jnp.take_along_axis(logp, y[:, None], axis=1).mean(),
        (log_probability(4, 8), integer(8, 4)),
        "-jnp.take_along_axis(logp, y[:, None], axis=1).mean()",
    ),
    OpCase(
        "nll_loss2d",
        lambda logp, y: -jnp.take_along_axis(logp, y[:, None], axis=1).mean(),
        (log_probability(2, 5, 4, 4), integer(5, 2, 4, 4)),
        "-jnp.take_along_axis(logp, y[:, None], axis=1).mean()",
    ),
    OpCase(
        "binary_cross_entropy",
        lambda p, t: -(t * jnp.log(p) + (1 - t) * jnp.log1p(-p)).mean(),
        (unit(4, 8), unit(4, 8)),
        "-(t * jnp.log(p) + (1 - t) * jnp.log1p(-p)).mean()",
    ),
    OpCase(
        "binary_cross_entropy_with_logits",
        lambda x, t: optax.sigmoid_binary_cross_entropy(x, t).mean(),
        (normal(4, 8), unit(4, 8)),
        "optax.sigmoid_binary_cross_entropy(x, t).mean()",
    ),
    OpCase(
        "kl_div",
        lambda logp, t: optax.losses.kl_divergence(logp, t).mean(),
        (log_probability(4, 8), probability(4, 8)),
        "optax.losses.kl_divergence(logp, t).mean()",
    ),
    OpCase(
        "ctc_loss",
        _ctc,
        (normal(2, 10, 6), integer(5, 2, 4)),
        "optax.losses.ctc_loss(logits, frame_padding, labels, label_padding).mean()",
    ),
    OpCase(
        "multi_margin_loss",
        _multi_margin,
        _LABELS,
        "jnp.where(others, jax.nn.relu(1 - x_y + x), 0.0).sum(axis=1).mean() / classes",
    ),
    OpCase(
        "multilabel_margin_loss",
        _multilabel_margin,
        (normal(4, 8), integer(8, 4, 3)),
        "jnp.where(others, jax.nn.relu(1 - x_y[:, :, None] + x[:, None]), 0.0)"
        ".sum(axis=(1, 2)).mean() / classes",
    ),
)

_REGRESSION = (
    OpCase(
        "l1_loss",
        lambda x, y: jnp.mean(jnp.abs(x - y)),
        _PAIR,
        "jnp.mean(jnp.abs(x - y))",
    ),
    OpCase(
        "mse_loss",
        lambda x, y: optax.squared_error(x, y).mean(),
        _PAIR,
        "optax.squared_error(x, y).mean()",
    ),
    OpCase(
        "huber_loss",
        lambda x, y: optax.huber_loss(x, y).mean(),
        _PAIR,
        "optax.huber_loss(x, y).mean()",
    ),
    OpCase(
        "smooth_l1_loss",
        lambda x, y: optax.huber_loss(x, y, delta=0.5).mean() / 0.5,
        _PAIR,
        "optax.huber_loss(x, y, delta=beta).mean() / beta",
    ),
    OpCase(
        "poisson_nll_loss",
        lambda x, t: (jnp.exp(x) - t * x).mean(),
        (normal(4, 8), positive(4, 8)),
        "(jnp.exp(x) - t * x).mean()",
    ),
)

_LIKELIHOODS = (
    OpCase(
        "gaussian_nll_loss",
        lambda x, y, v: (0.5 * (jnp.log(v) + (x - y) ** 2 / v)).mean(),
        (*_PAIR, positive(4, 8)),
        "(0.5 * (jnp.log(variance) + (x - y) ** 2 / variance)).mean()",
    ),
    OpCase(
        "multilabel_soft_margin_loss",
        lambda x, y: optax.losses.sigmoid_binary_cross_entropy(x, y).mean(),
        (normal(4, 8), unit(4, 8)),
        "optax.losses.sigmoid_binary_cross_entropy(x, y).mean()",
    ),
)

_MARGINS = (
    OpCase(
        "cosine_embedding_loss",
        _cosine_embedding,
        (*_PAIR, sign(4)),
        "jnp.where(target == 1, 1 - optax.losses.cosine_similarity(x, y), "
        "jax.nn.relu(optax.losses.cosine_similarity(x, y) - margin)).mean()",
    ),
    OpCase(
        "hinge_embedding_loss",
        lambda x, y: jnp.where(y == 1, x, jnp.maximum(0.0, 1.0 - x)).mean(),
        (normal(4, 8), sign(4, 8)),
        "jnp.where(y == 1, x, jnp.maximum(0.0, margin - x)).mean()",
    ),
    OpCase(
        "margin_ranking_loss",
        lambda a, b, y: jnp.maximum(0.0, -y * (a - b) + 0.5).mean(),
        (*_PAIR, sign(4, 8)),
        "jnp.maximum(0.0, -y * (a - b) + margin).mean()",
    ),
    OpCase(
        "soft_margin_loss",
        lambda x, y: jax.nn.softplus(-y * x).mean(),
        (normal(4, 8), sign(4, 8)),
        "jax.nn.softplus(-y * x).mean()",
    ),
    OpCase(
        "triplet_margin_loss",
        lambda a, p, n: optax.losses.triplet_margin_loss(a, p, n).mean(),
        (*_PAIR, normal(4, 8)),
        "optax.losses.triplet_margin_loss(anchor, positive, negative).mean()",
    ),
)

CASES = (*_CLASSES, *_REGRESSION, *_LIKELIHOODS, *_MARGINS)
