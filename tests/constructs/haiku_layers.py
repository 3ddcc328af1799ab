"""Haiku: transformed functions, their state, and its versions of JAX's transforms."""

import haiku as hk
import jax
import jax.numpy as jnp

from ._construct import Construct, images, matrix, normal


def call(name, fn, *inputs, no_gradient=""):
    """A transformed function: parameters, state, key and inputs are arguments."""
    transformed = hk.transform_with_state(fn)

    def arguments():
        made = tuple(make() for make in inputs)
        params, state = jax.jit(transformed.init)(jax.random.key(0), *made)
        return params, state, jax.random.key(1), *made

    return Construct(
        f"haiku_{name}", transformed.apply, arguments, no_gradient=no_gradient
    )


def sequences():
    return normal(5, 2, 4)


def layer(x):
    return jnp.tanh(hk.Linear(4)(x))


def mlp_with_dropout(x):
    x = hk.nets.MLP([6, 4])(x, dropout_rate=0.5, rng=hk.next_rng_key())
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x) + hk.Linear(4)(x)


def convolutional(x):
    # A bias before BatchNorm has no gradient but rounding.
    x = hk.Conv2D(4, 3, with_bias=False)(x)
    x = hk.BatchNorm(True, True, decay_rate=0.5)(x, is_training=True)
    x = hk.avg_pool(jax.nn.gelu(x), (2, 2, 1), (2, 2, 1), "SAME")
    return hk.Conv2DTranspose(2, 3)(x)


def dynamic_unroll(x):
    cell = hk.LSTM(4)
    return hk.dynamic_unroll(cell, x, cell.initial_state(2))


def scan(x):
    linear = hk.Linear(4)
    return hk.scan(lambda c, row: (jnp.tanh(linear(c) + row), c.sum()), x[0], x)


def state_in_scan(x):
    linear = hk.Linear(4)

    def step(carry, _):
        hk.set_state("count", hk.get_state("count", (), init=jnp.zeros) + 1)
        return jnp.tanh(linear(carry)), None

    return hk.scan(step, x, None, length=3)[0]


def while_loop(x):
    linear = hk.Linear(4)
    if hk.running_init():
        return linear(x)
    step = lambda s: (s[0] + 1, jnp.tanh(linear(s[1])))  # noqa: E731
    return hk.while_loop(lambda s: s[0] < 3, step, (0, x))[1]


def cond(x):
    first, second = hk.Linear(4), hk.Linear(4, with_bias=False)
    if hk.running_init():
        return first(x) + second(x)
    return hk.cond(x[0, 0] > 0, first, second, x)


def attention(x):
    mask = jnp.tril(jnp.ones((1, 1, 2, 2)))
    heads = hk.MultiHeadAttention(2, 2, w_init=hk.initializers.VarianceScaling())
    return heads(x, x, x, mask)


def gradient_inside(x):
    linear = hk.Linear(4)
    value, gradient = hk.value_and_grad(lambda x: jnp.sum(jnp.tanh(linear(x)) ** 2))(x)
    return value, x - 0.1 * gradient


CONSTRUCTS = (
    call("mlp_with_dropout", mlp_with_dropout, matrix),
    call("batch_norm_in_training", convolutional, images),
    call("lstm", dynamic_unroll, sequences),
    call("scan", scan, sequences),
    call("state_in_scan", state_in_scan, matrix),
    call("layer_stack", lambda x: hk.experimental.layer_stack(3)(layer)(x), matrix),
    call("remat", lambda x: hk.remat(layer)(x), matrix),
    call("vmap", lambda x: hk.vmap(layer, split_rng=False)(x), sequences),
    call("cond", cond, matrix),
    call("while_loop", while_loop, matrix, no_gradient="the length is not known"),
    call("attention", attention, sequences),
    call("gradient_inside", gradient_inside, matrix),
)
