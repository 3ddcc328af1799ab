"""Sums of many terms: messages, segments, pools, running sums and products."""

import jax
import jax.numpy as jnp
import numpy as np

from ._idiom import Table, normal

SUMS = Table()
add = SUMS.add

MANY = 20_000
SEGMENTS = np.zeros(4096, np.int32)
SEGMENTS[3000:] = 1
EDGES = np.arange(512, dtype=np.int32) % 8


@add(x=(4096, 1))
def messages_of_one(x):
    """4,096 messages of 1.0 to one node."""
    ones = x * 0 + 1.0
    return jnp.zeros((2, 1)).at[jnp.zeros(4096, jnp.int32)].add(ones)


@add(SEGMENTS, x=(4096, 2))
def segment_sum(x, segments):
    return jax.ops.segment_sum(x, segments, num_segments=2)


@add(SEGMENTS, x=(4096, 2))
def segment_mean(x, segments):
    total = jax.ops.segment_sum(x, segments, 2)
    count = jax.ops.segment_sum(jnp.ones_like(x), segments, 2)
    return total / jnp.maximum(count, 1)


@add(SEGMENTS, x=(4096, 2))
def segment_variance(x, segments):
    n = jax.ops.segment_sum(jnp.ones(4096), segments, 2)[:, None]
    mean = jax.ops.segment_sum(x, segments, 2) / n
    return jax.ops.segment_sum((x - mean[segments]) ** 2, segments, 2) / n


@add(EDGES, x=(512, 4))
def segment_softmax(x, segments):
    """As in graph attention."""
    top = jax.ops.segment_max(x, segments, 8)
    e = jnp.exp(x - top[segments])
    total = jax.ops.segment_sum(e, segments, 8)
    return e / total[segments]


@add(SEGMENTS, x=(4096, 2))
def scatter_add(x, index):
    return jnp.zeros((2, 2)).at[index].add(x)


@add(SEGMENTS, normal(2, 2), x=(4096, 2))
def scatter_add_into_state(x, index, state):
    return state.at[index].add(x)


@add(EDGES, x=(8, 16))
def gather_from_nodes(x, senders):
    return x[senders]


@add(SEGMENTS % 4, x=(4, 16))
def embedding_lookup(x, tokens):
    return jnp.take(x, tokens, axis=0)


@add(SEGMENTS % 4, x=(4, 16))
def embedding_by_one_hot(x, tokens):
    return jax.nn.one_hot(tokens, 4) @ x


@add(EDGES, EDGES[::-1].copy(), x=(8, 16))
def graph_convolution(x, senders, receivers):
    degree = jax.ops.segment_sum(jnp.ones(512), receivers, 8)
    messages = x[senders] / jnp.sqrt(degree[senders] * degree[receivers])[:, None]
    return jax.ops.segment_sum(messages, receivers, 8)


@add(x=(512, 2))
def histogram_soft(x):
    centres = jnp.linspace(-3.0, 3.0, 8)
    w = jnp.exp(-0.5 * (x[..., None] - centres) ** 2)
    return (w / (w.sum(-1, keepdims=True) + 1e-6)).sum(0)


@add(x=(MANY, 2))
def mean_pool(x):
    return jnp.mean(x, 0)


@add(x=(MANY, 2))
def mean_pool_by_sum(x):
    return x.sum(0) / x.shape[0]


@add(np.arange(MANY)[:, None] % 4 > 0, x=(MANY, 2))
def mean_pool_masked(x, mask):
    return (x * mask).sum(0) / mask.sum(0)


@add(x=(MANY, 2))
def mean_by_ones(x):
    return jnp.ones(x.shape[0]) @ x / x.shape[0]


@add(x=(MANY, 2))
def root_mean_square_of_many(x):
    return jnp.sqrt(jnp.mean(x**2, 0))


@add(x=(4096, 2))
def cumulative_sum(x):
    return jnp.cumsum(x, 0)


@add(x=(4096, 2))
def cumulative_sum_of_ones(x):
    return jnp.cumsum(x * 0 + 1, 0)


@add(x=(4096, 2))
def cumulative_sum_lax(x):
    return jax.lax.cumsum(x, 0)


@add(x=(4096, 2))
def cumulative_sum_reversed(x):
    """Returns of an episode."""
    return jnp.cumsum(x[::-1], 0)[::-1]


@add(x=(4096, 2))
def prefix_sum(x):
    return jax.lax.associative_scan(jnp.add, x)


@add(x=(1024, 2))
def cumulative_product_near_one(x):
    return jnp.cumprod(1 + 1e-3 * jnp.tanh(x), 0)


@add(x=(256, 2))
def transmittance(x):
    """As in volume rendering."""
    sigma = jnp.logaddexp(x, 0.0)
    alpha = 1 - jnp.exp(-sigma * 0.01)
    through = jnp.cumprod(1 - alpha + 1e-6, 0)
    return alpha * through


@add(x=(256, 2))
def transmittance_by_sum(x):
    density = jnp.maximum(x, 0) * 0.01
    return (1 - jnp.exp(-density)) * jnp.exp(-jnp.cumsum(density, 0))


@add(x=(2048, 2))
def loop_that_sums(x):
    def step(total, x):
        return total + x, None

    return jax.lax.scan(step, jnp.zeros(2), x)[0]


@add(x=(2048, 2))
def loop_that_sums_from_its_first(x):
    def step(total, x):
        return total + x, None

    return jax.lax.scan(step, x[0], x[1:])[0]


@add(x=(2048, 2))
def fori_loop_that_sums(x):
    body = lambda i, total: total + x[i]  # noqa: E731
    return jax.lax.fori_loop(0, x.shape[0], body, jnp.zeros(2))


@add(x=(512, 2))
def loop_that_sums_squares(x):
    def step(carry, x):
        total, squares = carry
        return (total + x, squares + x * x), None

    (total, squares), _ = jax.lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), x)
    return total / 512, squares / 512


@add(x=(16, 32))
def unrolled_sum(x):
    total = 0.0
    for i in range(x.shape[0]):
        total = total + x[i]
    return total


@add(normal(16, 4, 8), x=(4, 8))
def activation_used_by_every_iteration(x, weights):
    """Its gradient is a sum over iterations."""

    def step(total, w):
        return total + jnp.tanh(x * w), None

    return jax.lax.scan(step, jnp.zeros((4, 8)), weights)[0]


@add(normal(600, 2), x=(4, 2))
def activation_times_each_of_a_loop(x, weights):
    return jax.lax.scan(lambda c, w: (c, x * w), 0, weights)[1]


@add(x=(512, 2))
def dynamic_slices_of_a_sequence(x):
    def at(i):
        return jax.lax.dynamic_slice(x, (i, 0), (16, 2)).mean(0)

    return jax.lax.map(at, jnp.arange(496))


@add(x=(2, 32, 32, 4))
def average_pool(x):
    window = (1, 16, 16, 1)
    total = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID")
    return total / 256


@add(x=(2, 32, 32, 4))
def global_average_pool(x):
    return x.mean((1, 2))


@add(x=(1024, 4))
def attention_pool(x):
    e = jnp.exp(x[:, :1] - x[:, :1].max(0))
    return (e / e.sum(0) * x).sum(0)


@add(normal(1024), x=(1024, 4))
def weighted_mean(x, w):
    w = jnp.abs(w)
    return (w[:, None] * x).sum(0) / w.sum()


@add(x=(1024, 4))
def total_of_everything(x):
    return x.sum() / 1024


@add(normal(4), x=(2048, 4))
def broadcast_bias_over_many(x, b):
    """The gradient of the bias is a sum over 2,048 rows."""
    return x + b


@add(x=(1, 4))
def broadcast_to_many(x):
    return jnp.broadcast_to(x, (MANY, 4)) * 1.0


@add(x=(1, 4))
def repeat_many_times(x):
    return jnp.repeat(x, 4096, axis=0)
