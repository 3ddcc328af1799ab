"""Recurrences: decays, state spaces, cells, steps of solvers, sums over paths."""

import jax
import jax.numpy as jnp
import numpy as np

from ._idiom import Table, bias, normal, scale

RECURRENCES = Table()
add = RECURRENCES.add

STEPS = (256, 8)


@add(np.full(8, 0.999, np.float32), x=STEPS)
def decaying_state(x, decay):
    def step(h, x):
        h = decay * h + x
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), x)[1]


@add(normal(8), x=STEPS)
def diagonal_state_space(x, log_a):
    a = jnp.exp(-jnp.exp(log_a) * 0.01)
    b = 1 - a

    def step(h, x):
        h = a * h + b * x
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), x)[1]


@add(normal(8), x=STEPS)
def diagonal_state_space_in_parallel(x, log_a):
    a = jnp.broadcast_to(jnp.exp(-jnp.exp(log_a) * 0.01), x.shape)

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(combine, (a, x))[1]


@add(normal(8), normal(8, std=0.1), x=(64, 8))
def selective_state_space(x, a_log, dt_bias):
    """As in Mamba."""
    delta = jnp.logaddexp(0.01 * x + dt_bias, 0.0)
    a = jnp.exp(-delta * jnp.exp(a_log))

    def step(h, inputs):
        a, u = inputs
        h = a * h + u
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), (a, delta * x))[1]


@add(normal(8), normal(8), x=(2, 64, 8))
def weighted_key_values(x, w, u):
    """As in RWKV."""
    keys, values = x

    def step(carry, kv):
        num, den, top = carry
        k, v = kv
        m = jnp.maximum(top, u + k)
        a, b = jnp.exp(top - m), jnp.exp(u + k - m)
        y = (a * num + b * v) / (a * den + b)
        m = jnp.maximum(top - jnp.exp(w), k)
        a, b = jnp.exp(top - jnp.exp(w) - m), jnp.exp(k - m)
        return (a * num + b * v, a * den + b, m), y

    start = jnp.zeros(8), jnp.zeros(8), jnp.full(8, -1e38)
    return jax.lax.scan(step, start, (keys, values))[1]


@add(x=(3, 64, 8))
def retention(x):
    """Decays between positions, as in retentive networks."""
    q, k, v = x
    n = jnp.arange(64)
    distance = n[:, None] - n[None]
    decay = jnp.where(distance >= 0, (1 - 2.0**-5) ** distance, 0.0)
    scores = q @ k.T / 8**0.5 * decay
    return scores @ v


@add(x=(64, 8))
def decay_by_cumulative_logarithm(x):
    gates = -jnp.logaddexp(0.0, -x)
    total = jnp.cumsum(gates, 0)
    return jnp.exp(total - total[:1])


@add(normal(8, 8, std=0.3), bias(8), x=(32, 8))
def elman_cell(x, w, b):
    def step(h, x):
        h = jnp.tanh(x + h @ w + b)
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), x)[1]


@add(normal(8, 24, std=0.3), bias(24), x=(16, 24))
def gated_recurrent_cell(x, w, b):
    def step(h, x):
        xr, xz, xn = jnp.split(x, 3)
        hr, hz, hn = jnp.split(h @ w + b, 3)
        r, z = 1 / (1 + jnp.exp(-xr - hr)), 1 / (1 + jnp.exp(-xz - hz))
        n = jnp.tanh(xn + r * hn)
        h = (1 - z) * n + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), x)[1]


@add(normal(8, 32, std=0.3), bias(32), x=(16, 32))
def long_short_term_memory(x, w, b):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x + h @ w + b, 4)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (jnp.zeros(8), jnp.zeros(8)), x)[1]


@add(normal(8), x=STEPS)
def minimal_gated_scan(x, b):
    """As in minGRU: a gate and a candidate, both from the input."""
    z = 1 / (1 + jnp.exp(-(x + b)))

    def step(h, inputs):
        z, x = inputs
        h = (1 - z) * h + z * x
        return h, h

    return jax.lax.scan(step, jnp.zeros(8), (z, x))[1]


@add(x=(128, 8))
def discounted_returns(rewards):
    def step(total, reward):
        total = reward + 0.99 * total
        return total, total

    return jax.lax.scan(step, jnp.zeros(8), rewards, reverse=True)[1]


@add(normal(128), x=(128, 8))
def generalised_advantages(values, rewards):
    following = jnp.concatenate([values[1:], values[-1:]])
    deltas = rewards[:, None] + 0.99 * following - values

    def step(total, delta):
        total = delta + 0.99 * 0.95 * total
        return total, total

    return jax.lax.scan(step, jnp.zeros(8), deltas, reverse=True)[1]


@add(x=(4, 8))
def euler_steps(x):
    def step(y, _):
        return y + 0.001 * -jnp.tanh(y), None

    return jax.lax.scan(step, x, None, length=500)[0]


@add(x=(4, 8))
def runge_kutta_steps(x):
    f = lambda y: -0.1 * y  # noqa: E731

    def step(y, _):
        k1 = f(y)
        k2 = f(y + 0.05 * k1)
        k3 = f(y + 0.05 * k2)
        k4 = f(y + 0.1 * k3)
        return y + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jax.lax.scan(step, x, None, length=50)[0]


@add(x=(4, 8))
def leapfrog_steps(x):
    """As in Hamiltonian Monte Carlo."""

    def step(state, _):
        q, p = state
        p = p - 0.005 * q
        q = q + 0.01 * p
        return (q, p - 0.005 * q), None

    (q, p), _ = jax.lax.scan(step, (x, jnp.zeros_like(x)), None, length=100)
    return q, p


@add(normal(4, 8), x=(4, 8))
def gradient_steps(x, target):
    def step(y, _):
        return y - 0.01 * (y - target), None

    return jax.lax.scan(step, x, None, length=200)[0]


@add(normal(4, 8), abs(normal(4, 8)), x=(4, 8))
def adam_step(g, m, v):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    return m / (jnp.sqrt(v) + 1e-8), m, v


@add(normal(8, 8, std=0.1), x=(8, 8))
def power_iteration(x, w):
    def step(v, _):
        v = v @ w
        return v / (jnp.sqrt((v * v).sum(-1, keepdims=True)) + 1e-8), None

    return jax.lax.scan(step, x, None, length=4)[0]


@add(x=(8, 8))
def sinkhorn(x):
    def step(z, _):
        z = z - jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))
        z = z - z.max(-1, keepdims=True)
        z = z - jnp.log(jnp.exp(z - z.max(0)).sum(0)) - z.max(0)
        return z, None

    return jnp.exp(jax.lax.scan(step, x, None, length=10)[0])


@add(scale(8), x=(6, 4, 8))
def residual_stream_of_norms(x, g):
    """Layer after layer adds to what a norm reads."""
    h = x[0]
    for update in x[1:]:
        rms = jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        h = h + update * (h / rms * g)
    return h


@add(x=(32, 8), steps=31)
def highway_of_many_residuals(x):
    h = x[0]
    for update in x[1:]:
        h = h + 0.01 * jnp.tanh(update)
    return h


@add(x=(12, 16))
def forward_algorithm_by_logaddexp(logits):
    """As in CTC: paths through states, each of which may stay or go on."""
    z = logits - logits.max(-1, keepdims=True)
    logp = z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    start = jnp.where(jnp.arange(16) == 0, 0.0, -1e5)

    def step(alpha, logp):
        before = jnp.concatenate([jnp.full(1, -1e5), alpha[:-1]])
        alpha = jnp.logaddexp(alpha, before) + logp
        return alpha, None

    alpha, _ = jax.lax.scan(step, start, logp)
    return -alpha[8:12]


@add(normal(16, 16), x=(12, 16))
def crf_partition(emissions, transitions):
    def step(alpha, e):
        scores = alpha[:, None] + transitions + e
        m = scores.max(0)
        return m + jnp.log(jnp.exp(scores - m).sum(0)), None

    alpha, _ = jax.lax.scan(step, emissions[0], emissions[1:])
    m = alpha.max()
    return m + jnp.log(jnp.exp(alpha - m).sum())
