"""Losses, as people write them from logits and predictions."""

import jax
import jax.numpy as jnp

from ._idiom import Table, labels, normal, one_hot

LOSSES = Table()
add = LOSSES.add

LABELS = labels(8, 32)
ONE_HOT = one_hot(8, 32)


@add(LABELS)
def cross_entropy_by_log_of_sum(logits, y):
    z = logits - jnp.max(logits, -1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(z), -1)) - z[jnp.arange(8), y]


@add(LABELS)
def cross_entropy_by_take_along_axis(logits, y):
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    logp = shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))
    return -jnp.mean(jnp.take_along_axis(logp, y[:, None], -1)[:, 0])


@add(ONE_HOT)
def cross_entropy_one_hot(logits, y):
    m = logits.max(-1, keepdims=True)
    lse = m + jnp.log(jnp.exp(logits - m).sum(-1, keepdims=True))
    return -(y * (logits - lse)).sum(-1).mean()


@add(ONE_HOT)
def cross_entropy_of_probabilities(logits, y):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return -jnp.sum(y * jnp.log(p + 1e-4), -1)


@add(LABELS)
def cross_entropy_in_base_two(logits, y):
    z = logits - logits.max(-1, keepdims=True)
    lse = jnp.log2(jnp.sum(2 ** (z * 1.442695), -1)) / 1.442695
    return lse - jnp.take_along_axis(z, y[:, None], -1).squeeze(-1)


@add(LABELS, normal(8, mean=1.0, std=0.1))
def cross_entropy_masked(logits, y, weights):
    z = logits - logits.max(-1, keepdims=True)
    nll = jnp.log(jnp.exp(z).sum(-1)) - z[jnp.arange(8), y]
    return (nll * weights).sum() / (weights.sum() + 1e-8)


@add(LABELS)
def cross_entropy_with_z_loss(logits, y):
    m = logits.max(-1)
    lse = jnp.log(jnp.exp(logits - m[:, None]).sum(-1)) + m
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return lse - picked + 1e-4 * lse**2


@add(ONE_HOT)
def label_smoothing(logits, y):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    smooth = y * 0.9 + 0.1 / 32
    return -(smooth * logp).sum(-1)


@add(LABELS)
def label_smoothing_by_mean(logits, y):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    nll = -logp[jnp.arange(8), y]
    return 0.9 * nll - 0.1 * logp.mean(-1)


@add(LABELS)
def focal_loss(logits, y):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    logpt = logp[jnp.arange(8), y]
    return -((1 - jnp.exp(logpt)) ** 2) * logpt


@add(normal(8, 32))
def kl_of_softmaxes(logits, teacher):
    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))

    logp, logq = log_softmax(teacher), log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - logq), -1)


@add(normal(8, 32))
def distillation_with_temperature(logits, teacher):
    def soft(z):
        e = jnp.exp((z - z.max(-1, keepdims=True)) / 4.0)
        return e / e.sum(-1, keepdims=True)

    p, q = soft(teacher), soft(logits)
    return 16.0 * jnp.sum(p * (jnp.log(p + 1e-6) - jnp.log(q + 1e-6)), -1).mean()


@add(normal(8, 32))
def gaussian_nll(mu, y):
    log_var = 0.1 * mu[:, ::-1]
    return 0.5 * (jnp.log(2 * jnp.pi) + log_var + (y - mu) ** 2 / jnp.exp(log_var))


@add(normal(8, 32), normal(32, mean=-1.0))
def gaussian_nll_of_log_scale(mu, y, log_scale):
    z = (y - mu) * jnp.exp(-log_scale)
    return (0.5 * z**2 + log_scale + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)


@add(normal(8, 32))
def gaussian_nll_softplus_variance(mu, y):
    var = jnp.logaddexp(mu[:, ::-1], 0.0) + 1e-4
    return jnp.mean(0.5 * jnp.log(var) + 0.5 * (y - mu) ** 2 / var, -1)


@add(normal(8, 32))
def huber(pred, y):
    e = jnp.abs(pred - y)
    quadratic = jnp.minimum(e, 1.0)
    return (0.5 * quadratic**2 + (e - quadratic)).mean()


@add(normal(8, 32))
def smooth_l1(pred, y):
    e = jnp.abs(pred - y)
    return jnp.where(e < 1.0, 0.5 * e * e, e - 0.5).mean(-1)


@add(normal(8, 32))
def pseudo_huber(pred, y):
    return jnp.mean(jnp.sqrt(1 + (pred - y) ** 2) - 1, -1)


@add(normal(8, 32))
def charbonnier(pred, y):
    return jnp.sqrt((pred - y) ** 2 + 1e-6).mean(-1)


@add(normal(8, 32))
def log_cosh_by_softplus(pred, y):
    e = pred - y
    return jnp.mean(e + jnp.log1p(jnp.exp(-2.0 * jnp.abs(e))) - jnp.log(2.0))


@add(normal(8, 32))
def mean_squared_error(pred, y):
    return jnp.mean((pred - y) ** 2)


@add(normal(8, 32))
def mean_squared_error_by_square(pred, y):
    return jnp.square(pred - y).mean(-1)


@add(x=(2, 8, 32))
def mean_squared_error_of_two_products(x):
    pred, y = x
    diff = pred - y
    return jnp.sum(diff * diff) / diff.size


@add(normal(8, 32))
def root_mean_squared_error(pred, y):
    return jnp.sqrt(jnp.mean((pred - y) ** 2))


@add(normal(8, 32))
def mean_absolute_error(pred, y):
    return jnp.abs(pred - y).mean()


@add(normal(8, 32))
def mean_squared_log_error(pred, y):
    return jnp.mean((jnp.log1p(jnp.abs(pred)) - jnp.log1p(jnp.abs(y))) ** 2)


@add(normal(8, 32))
def explained_variance(pred, y):
    return jnp.var(y - pred) / (jnp.var(y) + jnp.var(pred) + 1e-8)


@add(normal(8, 32))
def weighted_squares_over_20_000(pred, y):
    e = jnp.tile((pred - y).ravel(), 80)
    return (e**2).sum() / e.size


@add(x=(2, 16, 32))
def info_nce(x):
    a, b = x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-8)
    sim = a @ b.T / 0.07
    sim = sim - sim.max(-1, keepdims=True)
    logp = sim - jnp.log(jnp.exp(sim).sum(-1, keepdims=True))
    return -jnp.diagonal(logp).mean()


@add(2.6593, x=(2, 16, 32))
def clip_loss(x, logit_scale):
    image, text = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    logits = jnp.exp(logit_scale) * image @ text.T

    def nll(z):
        z = z - z.max(-1, keepdims=True)
        return jnp.log(jnp.exp(z).sum(-1)) - jnp.diag(z)

    return 0.5 * (nll(logits) + nll(logits.T)).mean()


@add(x=(2, 16, 32))
def contrastive_by_distance(x):
    a, b = x
    d = jnp.sqrt(jnp.sum((a - b) ** 2, -1) + 1e-8)
    same = jnp.arange(16) % 2
    return jnp.mean(same * d**2 + (1 - same) * jnp.maximum(0.0, 10.0 - d) ** 2)


@add(x=(3, 16, 32))
def triplet(x):
    anchor, positive, negative = x
    near = jnp.sum((anchor - positive) ** 2, -1)
    far = jnp.sum((anchor - negative) ** 2, -1)
    return jnp.maximum(near - far + 1.0, 0.0)


@add(x=(3, 16, 32))
def triplet_of_roots(x):
    anchor, positive, negative = x
    near = jnp.sqrt(jnp.sum(jnp.square(anchor - positive), -1) + 1e-12)
    far = jnp.sqrt(jnp.sum(jnp.square(anchor - negative), -1) + 1e-12)
    return jax.nn.relu(near - far + 0.2)


@add(abs(normal(8, 32)))
def poisson_nll(log_rate, y):
    return jnp.mean(jnp.exp(log_rate) - y * log_rate, -1)


@add(abs(normal(8, 32)))
def poisson_nll_of_rate(x, y):
    rate = jnp.logaddexp(x, 0.0)
    return (rate - y * jnp.log(rate + 1e-8)).mean(-1)


@add(ONE_HOT)
def bce_with_logits(x, y):
    return jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x)))


@add(ONE_HOT)
def bce_with_logits_mean(x, y):
    loss = jnp.clip(x, 0) - x * y + jnp.log(1 + jnp.exp(-jnp.abs(x)))
    return loss.mean()


@add(ONE_HOT)
def bce_by_softplus(x, y):
    return (jnp.logaddexp(0.0, x) - x * y).sum(-1)


@add(ONE_HOT)
def bce_by_hand_of_sigmoid(x, y):
    p = jnp.clip(1 / (1 + jnp.exp(-x)), 1e-3, 1 - 1e-3)
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean(-1)


@add(ONE_HOT)
def dice(x, y):
    p = 1 / (1 + jnp.exp(-x))
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


@add(LABELS)
def perplexity(logits, y):
    z = logits - logits.max(-1, keepdims=True)
    nll = jnp.log(jnp.exp(z).sum(-1)) - z[jnp.arange(8), y]
    return jnp.exp(nll.mean())


@add()
def entropy_of_logits(logits):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    return -(jnp.exp(logp) * logp).sum(-1)


@add()
def entropy_of_probabilities(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return -(p * jnp.log(p + 1e-9)).sum(-1)


@add(normal(8, 16))
def kl_of_a_vae(x, noise):
    mu, log_var = jnp.split(x, 2, -1)
    z = mu + jnp.exp(0.5 * log_var) * noise
    kl = -0.5 * jnp.sum(1 + log_var - mu**2 - jnp.exp(log_var), -1)
    return kl, z


@add(normal(8, 16), normal(8, 16))
def elbo(x, noise, y):
    mu, rho = jnp.split(x, 2, -1)
    sigma = jnp.log1p(jnp.exp(-jnp.abs(rho))) + jnp.maximum(rho, 0) + 1e-3
    z = mu + sigma * noise
    nll = 0.5 * ((y - z) ** 2).sum(-1)
    kl = 0.5 * (sigma**2 + mu**2 - 1 - 2 * jnp.log(sigma)).sum(-1)
    return (nll + kl).mean()


@add(normal(8), labels(8, 32))
def policy_gradient(logits, advantage, action):
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    picked = logp[jnp.arange(8), action]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -picked * advantage


@add(normal(8), labels(8, 32), -abs(normal(8, mean=3.0)))
def clipped_surrogate(logits, advantage, action, old):
    """As in PPO."""
    z = logits - logits.max(-1, keepdims=True)
    logp = (z - jnp.log(jnp.exp(z).sum(-1, keepdims=True)))[jnp.arange(8), action]
    ratio = jnp.exp(logp - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


@add(x=(2, 16, 32))
def barlow_twins(x):
    a, b = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-5)
    c = a.T @ b / 16
    on = ((jnp.diagonal(c) - 1) ** 2).sum()
    off = (c**2).sum() - (jnp.diagonal(c) ** 2).sum()
    return on + 5e-3 * off


@add(x=(32, 16))
def variance_and_covariance_as_vicreg(z):
    z = z - z.mean(0)
    std = jnp.sqrt(z.var(0) + 1e-4)
    cov = z.T @ z / 31
    off = cov - jnp.diag(jnp.diag(cov))
    return jnp.maximum(0, 1 - std).mean() + (off**2).sum() / 16


@add(x=(2, 16, 8))
def hinge_over_pairs(x):
    good, bad = x
    return jnp.maximum(0.0, 1.0 - good + bad).sum(-1)


@add(normal(8, 32))
def quantile_loss(pred, y):
    e = y - pred
    return jnp.maximum(0.9 * e, -0.1 * e).mean(-1)


@add(x=(2, 16, 8))
def divergence_of_bernoullis(x):
    p, q = jax.nn.sigmoid(x)
    return jax.scipy.special.kl_div(p, q).sum(-1)


@add(x=(2, 16, 8))
def relative_entropy_of_classes(x):
    p, q = jax.nn.softmax(x)
    return jax.scipy.special.rel_entr(p, q).sum(-1)
