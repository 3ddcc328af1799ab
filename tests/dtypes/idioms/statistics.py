"""Statistics, softmaxes and activations by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from ._idiom import Table, normal

STATISTICS = Table()
add = STATISTICS.add


@add(x=(64, 8))
def variance_of_squares(x):
    return jnp.mean((x - jnp.mean(x, 0)) ** 2, 0)


@add(x=(64, 8))
def variance_by_moments(x):
    return jnp.mean(x**2, 0) - jnp.mean(x, 0) ** 2


@add(x=(64, 8))
def variance_by_sums(x):
    n = x.shape[0]
    return (jnp.sum(x * x, 0) - jnp.sum(x, 0) ** 2 / n) / (n - 1)


@add(x=(64, 8))
def variance_by_jnp(x):
    return x.var(0, ddof=1)


@add(x=(64, 8))
def standard_deviation(x):
    d = x - x.mean(0)
    return jnp.sqrt((d * d).mean(0))


@add(x=(64, 8))
def variance_of_pairs(x):
    return 0.5 * jnp.mean((x[:, None] - x[None]) ** 2, (0, 1))


@add(x=(64, 8))
def skewness(x):
    d = x - x.mean(0)
    m2 = jnp.mean(d**2, 0)
    return jnp.mean(d**3, 0) / (m2**1.5 + 1e-8)


@add(x=(64, 8))
def kurtosis(x):
    d = x - x.mean(0)
    return jnp.mean(d**4, 0) / jnp.mean(d**2, 0) ** 2 - 3.0


@add(x=(64, 8))
def z_score_then_moments(x):
    z = (x - x.mean(0)) / x.std(0)
    return (z**3).mean(0), (z**4).mean(0)


@add(x=(64, 8))
def covariance(x):
    d = x - x.mean(0)
    return d.T @ d / (x.shape[0] - 1)


@add(x=(64, 8))
def covariance_elementwise(x):
    d = x - x.mean(0)
    return jnp.mean(d[:, :, None] * d[:, None, :], 0)


@add(x=(2, 64, 8))
def correlation(x):
    a, b = x - x.mean(1, keepdims=True)
    ab = jnp.sum(a * b, 0)
    return ab / jnp.sqrt(jnp.sum(a * a, 0) * jnp.sum(b * b, 0))


@add(x=(2, 64, 8))
def correlation_by_std(x):
    a, b = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-8)
    return (a * b).mean(0)


@add(x=(64, 8))
def welford(x):
    def step(carry, x):
        n, mean, m2 = carry
        n = n + 1
        delta = x - mean
        mean = mean + delta / n
        m2 = m2 + delta * (x - mean)
        return (n, mean, m2), None

    start = (jnp.zeros(()), jnp.zeros(8), jnp.zeros(8))
    (n, mean, m2), _ = jax.lax.scan(step, start, x)
    return mean, m2 / n


@add(normal(8), x=(200, 8))
def exponential_moving_average(x, start):
    def step(ema, x):
        ema = 0.99 * ema + 0.01 * x
        return ema, ema

    return jax.lax.scan(step, start, x)[1]


@add(normal(8), x=(16, 8))
def moving_average_update(x, ema):
    mean = x.mean(0)
    return ema + (1 - 0.999) * (mean - ema)


@add(x=(512, 4))
def cumulative_mean(x):
    return jnp.cumsum(x, 0) / jnp.arange(1, x.shape[0] + 1)[:, None]


@add(x=(64, 8))
def moving_variance(x):
    windows = jnp.stack([x[i : i + 48] for i in range(16)])
    mean = windows.mean(0)
    return ((windows - mean) ** 2).mean(0)


@add()
def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@add()
def softmax_through_log(x):
    m = jnp.max(x, -1, keepdims=True)
    return jnp.exp(x - m - jnp.log(jnp.sum(jnp.exp(x - m), -1, keepdims=True)))


@add()
def softmax_without_maximum(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)


@add(0.7)
def softmax_with_temperature(x, temperature):
    z = x / temperature
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    e = jnp.exp(z)
    return e * (1.0 / e.sum(-1, keepdims=True))


@add(np.arange(32) % 3 > 0)
def softmax_masked(x, mask):
    x = jnp.where(mask, x, -1e9)
    e = jnp.exp(x - x.max(-1, keepdims=True)) * mask
    return e / (e.sum(-1, keepdims=True) + 1e-8)


@add()
def log_softmax(x):
    z = x - x.max(-1, keepdims=True)
    return z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))


@add()
def logsumexp(x):
    m = x.max(-1)
    return m + jnp.log(jnp.sum(jnp.exp(x - m[:, None]), -1))


@add()
def logmeanexp(x):
    m = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    return (m + jnp.log(jnp.mean(jnp.exp(x - m), -1, keepdims=True)))[..., 0]


@add(abs(normal(8, 32)) + 0.1)
def gumbel_softmax(x, u):
    g = -jnp.log(-jnp.log(u / 4.0) + 1e-8)
    z = (x + g) / 0.5
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@add()
def softmax_straight_through(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    hard = (p == p.max(-1, keepdims=True)).astype(p.dtype)
    return hard + p - jax.lax.stop_gradient(p)


@add()
def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


@add()
def sigmoid_by_tanh(x):
    return 0.5 * (jnp.tanh(0.5 * x) + 1)


@add()
def log_sigmoid(x):
    return -jnp.logaddexp(0.0, -x)


@add()
def tanh_by_exp(x):
    e = jnp.exp(-2 * jnp.abs(x))
    return jnp.sign(x) * (1 - e) / (1 + e)


@add()
def softplus(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


@add()
def softplus_naive(x):
    return jnp.log(1 + jnp.exp(x))


@add(1.3)
def swish(x, beta):
    return x / (1 + jnp.exp(-beta * x))


@add()
def gelu_tanh(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@add()
def gelu_erf(x):
    return x * 0.5 * (1.0 + jax.lax.erf(x / jnp.sqrt(2.0)))


@add()
def gelu_quick(x):
    return x * (1 / (1 + jnp.exp(-1.702 * x)))


@add()
def mish(x):
    return x * jnp.tanh(jnp.logaddexp(x, 0.0))


@add()
def snake(x):
    return x + jnp.sin(x) ** 2


@add(normal(32))
def gated_linear_unit(x, b):
    x, gate = jnp.split(x + b, 2, -1)
    return x * (1 / (1 + jnp.exp(-gate)))


@add()
def geometric_mean(x):
    return jnp.exp(jnp.mean(jnp.log(jnp.abs(x) + 1e-6), -1))


@add()
def harmonic_mean(x):
    return x.shape[-1] / jnp.sum(1 / (jnp.abs(x) + 1e-3), -1)


@add()
def power_mean(x):
    """As generalised-mean pooling."""
    return jnp.mean(jnp.maximum(x, 1e-6) ** 3.0, -1) ** (1 / 3.0)


@add()
def log1p_features(x):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


@add()
def inverse_hyperbolic_sine(x):
    return jnp.log(jnp.abs(x) + jnp.sqrt(x * x + 1)) * jnp.sign(x)


@add()
def squash(x):
    """As in capsule networks."""
    sq = jnp.sum(x**2, -1, keepdims=True)
    return sq / (1 + sq) * x / jnp.sqrt(sq + 1e-8)


@add()
def soft_argmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return (p * jnp.arange(32.0)).sum(-1)


@add()
def router_probabilities_of_the_best(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    top, _ = jax.lax.top_k(p, 2)
    return top / (top.sum(-1, keepdims=True) + 1e-6)


@add(x=(64, 8))
def load_balancing(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    share = jax.nn.one_hot(jnp.argmax(x, -1), 8).mean(0)
    return 8 * (share * p.mean(0)).sum()
