"""Flax nnx: modules merged from their state, and nnx's own transforms inside."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ._construct import Construct, images, matrix, sequences

# What a call may change, keys left out: they cannot be compared as numbers.
CHANGING = nnx.Any(nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngCount)


def call(name, make, *inputs, run=None, no_gradient=""):
    """The call of a module: its state and inputs are arguments, its updates results."""

    @functools.cache
    def graph():
        return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def arguments():
        return nnx.state(make(nnx.Rngs(0))), *(make() for make in inputs)

    def apply(state, *inputs):
        # A copy: a module merged without one updates the state that it is made of.
        module = nnx.merge(graph(), state, copy=True)
        result = module(*inputs) if run is None else run(module, *inputs)
        return result, nnx.state(module, CHANGING)

    return Construct(f"nnx_{name}", apply, arguments, no_gradient=no_gradient)


def tokens():
    return jnp.array([[1, 5, 2, 0], [3, 3, 4, 6]])


def convolutional(rngs):
    return nnx.Sequential(
        # A bias before BatchNorm has no gradient but rounding.
        nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs),
        nnx.BatchNorm(4, momentum=0.5, rngs=rngs),
        nnx.gelu,
        nnx.Dropout(0.5, rngs=rngs),
        nnx.ConvTranspose(4, 2, (3, 3), rngs=rngs),
    )


class Block(nnx.Module):
    """A residual layer with a norm and dropout."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.layer(self.norm(x))))


class Stack(nnx.Module):
    """Blocks made by vmap and run, checkpointed, by a scan."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=2)(nnx.vmap(Block))
        self.blocks = make(rngs)

    def __call__(self, x):
        step = nnx.remat(lambda x, block: block(x))
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.blocks
        )


class Language(nnx.Module):
    """One table embeds the tokens and gives the logits; one layer is used twice."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = self.first
        self.norm = nnx.RMSNorm(4, rngs=rngs)

    def __call__(self, tokens):
        x = self.second(jnp.tanh(self.first(self.embed(tokens))))
        return self.embed.attend(self.norm(x))


class Sown(nnx.Module):
    """What a layer computes is kept as an intermediate."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return jnp.tanh(x)


def conditional(module, x):
    return nnx.cond(
        x[0, 0] > 0,
        lambda block, x: block(x),
        lambda block, x: block.layer(x),
        module,
        x,
    )


def looped(module, x):
    step = lambda s: (s[0] + 1, s[1], jnp.tanh(s[1].layer(s[2])))  # noqa: E731
    return nnx.while_loop(lambda s: s[0] < 3, step, (0, module, x))[2]


def total(module, x):
    return jnp.sum(jnp.tanh(module(x)) ** 2)


def by_hand(module, x):
    """The functional way: a scan of JAX's over a state split off the module."""
    graph, state = nnx.split(module)

    def step(carry, _):
        state, x = carry
        block = nnx.merge(graph, state)
        y = block(x)
        return (nnx.state(block), jnp.tanh(y)), y.mean()

    (state, y), means = jax.lax.scan(step, (state, x), None, length=2)
    nnx.update(module, state)
    return y, means


def decode(attention, tokens):
    """Three tokens one by one; the cache stays in the module."""
    return [attention(tokens[:, [i]], decode=True) for i in range(3)]


def decoder(rngs):
    attention = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=True)
    attention.init_cache((2, 5, 4))
    return attention


def masked(attention, x):
    return attention(x, mask=nnx.make_causal_mask(jnp.ones((2, 5))))


def recurrent(cell):
    return lambda rngs: nnx.RNN(cell(4, 3, rngs=rngs), rngs=rngs)


def bidirectional(rngs):
    forward, backward = recurrent(nnx.GRUCell)(rngs), recurrent(nnx.GRUCell)(rngs)
    return nnx.Bidirectional(forward, backward, rngs=rngs)


CONSTRUCTS = (
    call("convolutions_in_training", convolutional, images),
    call("remat_in_scan", Stack, matrix),
    call("jit", Block, matrix, run=nnx.jit(lambda block, x: block(x))),
    call("cond", Block, matrix, run=conditional),
    call("while_loop", Block, matrix, run=looped, no_gradient="the length is unknown"),
    call("grad_inside", Block, matrix, run=nnx.grad(total)),
    call("scan_by_hand", Block, matrix, run=by_hand),
    call("lstm", recurrent(nnx.LSTMCell), sequences),
    call("bidirectional_gru", bidirectional, sequences),
    call(
        "attention_with_mask_and_dropout",
        lambda rngs: nnx.MultiHeadAttention(
            2, 4, dropout_rate=0.3, deterministic=False, decode=False, rngs=rngs
        ),
        sequences,
        run=masked,
    ),
    call("attention_decodes", decoder, sequences, run=decode),
    call("shared_parameters", Language, tokens),
    call("sown", Sown, matrix, run=nnx.capture(lambda m, x: m(x), nnx.Intermediate)),
)
