"""Networks for graphs, tables, sounds, points, fields and tasks."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from small_networks._network import (
    Network,
    classifier,
    integers,
    normal,
    normed,
    of_module,
    squares,
)


class Messages(nn.Module):
    """A network of a graph, whose edges send messages."""

    edges: tuple[jax.Array, jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        senders, receivers = self.edges
        for _ in range(3):
            ends = jnp.concatenate([x[senders], x[receivers]], axis=-1)
            messages = nn.relu(nn.Dense(128)(ends))
            found = jax.ops.segment_sum(messages, receivers, len(x))
            y = nn.Dense(128)(jnp.concatenate([x, found], axis=-1))
            x = nn.LayerNorm()(x + y)
        return nn.Dense(7)(x)


class GraphAttention(nn.Module):
    edges: tuple[jax.Array, jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        senders, receivers = self.edges
        for layer in range(2):
            h = nn.DenseGeneral((4, 32))(x)
            ends = jnp.concatenate([h[senders], h[receivers]], axis=-1)
            weights = self.param(f"a_{layer}", nn.initializers.normal(0.1), (4, 64))
            scores = nn.leaky_relu(jnp.einsum("ehd,hd->eh", ends, weights))
            largest = jax.ops.segment_max(scores, receivers, len(x))
            shares = jnp.exp(scores - largest[receivers])
            total = jax.ops.segment_sum(shares, receivers, len(x))
            sent = (shares / total[receivers])[..., None] * h[senders]
            x = nn.elu(jax.ops.segment_sum(sent, receivers, len(x)).reshape(len(x), -1))
        return nn.Dense(7)(x)


class Recommender(nn.Module):
    """One as DLRM: embeddings of categories, products of all pairs of them."""

    @nn.compact
    def __call__(self, numbers: jax.Array, categories: jax.Array) -> jax.Array:
        embeddings = [nn.Embed(10000, 64)(column) for column in categories.T]
        x = numbers
        for width in (256, 128, 64):
            x = nn.relu(nn.Dense(width)(x))
        every = jnp.stack([x, *embeddings], axis=1)
        pairs = jnp.einsum("bnd,bmd->bnm", every, every)
        first, second = np.tril_indices(every.shape[1], -1)
        x = jnp.concatenate([x, pairs[:, first, second]], axis=-1)
        for width in (512, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


class Conformer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(192)(x)
        for _ in range(3):
            x = x + self.feed(x) / 2
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            y = nn.glu(nn.Dense(384)(nn.LayerNorm()(x)))
            y = nn.swish(normed(nn.Conv(192, (15,), feature_group_count=192)(y)))
            x = x + nn.Dense(192)(y)
            x = x + self.feed(x) / 2
        return nn.Dense(40)(x)

    def feed(self, x: jax.Array) -> jax.Array:
        return nn.Dense(192)(nn.swish(nn.Dense(768)(nn.LayerNorm()(x))))


class Points(nn.Module):
    """A network of sets of points, as PointNet."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (64, 128, 512):
            x = nn.relu(normed(nn.Dense(width)(x)))
        x = x.max(1)
        for width in (256, 128):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(40)(x)


class FourierOperator(nn.Module):
    modes: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x)
        for layer in range(3):
            shape = self.modes, 64, 64
            real, imaginary = (
                self.param(f"{name}_{layer}", nn.initializers.normal(0.02), shape)
                for name in ("real", "imaginary")
            )
            waves = jnp.fft.rfft(x, axis=1)[:, : self.modes]
            waves = jnp.einsum("bkc,kcd->bkd", waves, real + 1j * imaginary)
            y = jnp.fft.irfft(waves, n=x.shape[1], axis=1)
            x = nn.gelu(y + nn.Dense(64)(x))
        return nn.Dense(1)(nn.gelu(nn.Dense(128)(x)))


def edges(nodes: int, count: int) -> tuple[jax.Array, jax.Array]:
    return integers(nodes, count), integers(nodes, count, seed=3)


def messages() -> Network:
    return classifier(Messages(edges(4000, 40000)), normal(4000, 128), 7)


def graph_attention() -> Network:
    return classifier(GraphAttention(edges(3000, 30000)), normal(3000, 128), 7)


def recommender() -> Network:
    def loss(logits: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits, jnp.ones(512)).mean()

    return of_module(Recommender(), normal(512, 13), integers(10000, 512, 8), loss=loss)


def conformer() -> Network:
    labels = integers(39, 4, 20) + 1
    paddings = jnp.zeros((4, 200)), jnp.zeros((4, 20))

    def loss(logits: jax.Array) -> jax.Array:
        return optax.ctc_loss(logits, paddings[0], labels, paddings[1]).mean()

    return of_module(Conformer(), normal(4, 200, 80), loss=loss)


def points() -> Network:
    return classifier(Points(), normal(16, 512, 3), 40)


def fourier_operator() -> Network:
    return of_module(FourierOperator(), normal(16, 256, 2))


def dense_layers(*widths: int) -> list[Any]:
    return [
        (normal(taken, given, seed=taken) / taken**0.5, jnp.zeros(given))
        for taken, given in pairwise(widths)
    ]


def run_layers(
    activation: Callable[[jax.Array], jax.Array], layers: Any, x: jax.Array
) -> jax.Array:
    *hidden, (last, shift) = layers
    for weights, bias in hidden:
        x = activation(x @ weights + bias)
    return x @ last + shift


def differential_equation() -> Network:
    """What a network says is the change, in twenty steps of Runge and Kutta."""

    change = partial(run_layers, jnp.tanh)

    def apply(layers: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> Any:
            size = 0.05
            a = change(layers, x)
            b = change(layers, x + size / 2 * a)
            c = change(layers, x + size / 2 * b)
            d = change(layers, x + size * c)
            return x + size / 6 * (a + 2 * b + 2 * c + d), None

        return lax.scan(step, x, None, length=20)[0]

    return Network(dense_layers(64, 256, 256, 64), (normal(128, 64),), apply, squares)


def causal_convolutions() -> Network:
    """Dilated convolutions of one series each, written by hand."""
    params = {
        "kernels": [0.1 * normal(3, 64 if i else 1, 64, seed=i) for i in range(5)],
        "biases": [jnp.zeros(64)] * 5,
        "out": 0.1 * normal(64, 8),
    }

    def apply(params: Any, x: jax.Array) -> jax.Array:
        pairs = zip(params["kernels"], params["biases"], strict=True)
        for layer, (kernel, bias) in enumerate(pairs):
            y = lax.conv_general_dilated(
                x,
                kernel,
                window_strides=(1,),
                padding=[(2 * 2**layer, 0)],
                rhs_dilation=(2**layer,),
                dimension_numbers=("NWC", "WIO", "NWC"),
            )
            y = jax.nn.relu(y + bias)
            x = x + y if x.shape == y.shape else y
        return x[:, -1] @ params["out"]

    return Network(params, (normal(16, 256, 1),), apply, squares)


def meta_learning() -> Network:
    """What three steps of gradient descent make of a network, for eight tasks."""
    targets, predict = normal(8, 32, 8), partial(run_layers, jax.nn.relu)

    def apply(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def learnt(x: jax.Array, y: jax.Array) -> jax.Array:
            found = layers
            for _ in range(3):
                grads = jax.grad(lambda p: squares(predict(p, x) - y))(found)
                found = jax.tree.map(lambda p, g: p - 0.1 * g, found, grads)
            return predict(found, x)

        return jax.vmap(learnt)(x, y)

    inputs = normal(8, 32, 32, seed=0), targets
    return Network(
        dense_layers(32, 256, 256, 8), inputs, apply, lambda y: squares(y - targets)
    )
