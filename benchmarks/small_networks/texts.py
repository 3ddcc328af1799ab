"""Networks for texts: transformers, recurrent networks, embeddings."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from small_networks._network import (
    Block,
    Network,
    classifier,
    cross_entropy,
    integers,
    normal,
    of_module,
    squares,
)


class MaskedLanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(8000, 384)
        positions = nn.Embed(tokens.shape[1], 384)(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm()(embedding(tokens) + positions)
        for _ in range(4):
            x = Block(384, 6)(x)
        return embedding.attend(nn.LayerNorm()(x))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embedding = nn.Embed(4000, 256)
        x, y = embedding(source), embedding(target)
        for _ in range(2):
            x = Block(256, 4)(x)
        for _ in range(2):
            y = Block(256, 4)(y, x, nn.make_causal_mask(target))
        return nn.Dense(4000)(y)


class BidirectionalLSTM(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        there, back = (nn.RNN(nn.LSTMCell(128)) for _ in range(2))
        x = nn.Bidirectional(there, back)(nn.Embed(5000, 128)(tokens))
        weights = nn.softmax(nn.Dense(1)(nn.tanh(nn.Dense(64)(x))), axis=1)
        return nn.Dense(5)(jnp.sum(weights * x, axis=1))


class LinearAttention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            y = nn.LayerNorm()(x)
            q, k, v = (nn.DenseGeneral((4, 64))(y) for _ in range(3))
            x = x + nn.Dense(256)(attend_linearly(nn.elu(q) + 1, nn.elu(k) + 1, v))
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
        return nn.Dense(64)(x)


def attend_linearly(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention without softmax, by a state of keys and values, token by token."""

    def step(carry: Any, token: Any) -> Any:
        (state, total), (q, k, v) = carry, token
        state = state + k[..., :, None] * v[..., None, :]
        total = total + k
        over = jnp.einsum("bhd,bhd->bh", q, total)[..., None] + 1e-6
        return (state, total), jnp.einsum("bhd,bhde->bhe", q, state) / over

    batch, _, heads, width = q.shape
    zeros = jnp.zeros((batch, heads, width, width)), jnp.zeros((batch, heads, width))
    _, found = lax.scan(step, zeros, tuple(a.swapaxes(0, 1) for a in (q, k, v)))
    return found.swapaxes(0, 1).reshape(*q.shape[:2], -1)


def masked_language_model() -> Network:
    tokens = integers(8000, 4, 128)
    model = MaskedLanguageModel()
    return of_module(model, tokens, loss=lambda y: cross_entropy(y, tokens))


def encoder_decoder() -> Network:
    tokens = integers(4000, 8, 96)
    model = EncoderDecoder()
    return of_module(model, tokens, tokens, loss=lambda y: cross_entropy(y, tokens))


def bidirectional_lstm() -> Network:
    return classifier(BidirectionalLSTM(), integers(5000, 32, 64), 5)


def linear_attention() -> Network:
    return of_module(LinearAttention(), normal(4, 64, 256))


def decoding() -> Network:
    """A transformer written by hand that makes 128 tokens, with a cache of keys."""
    width, heads, length, batch = 512, 8, 128, 8
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layers = [
        {name: 0.04 * normal(*shape, seed=i) for name, shape in shapes.items()}
        for i in range(2)
    ]

    def attend(layer: Any, cache: Any, x: jax.Array, at: jax.Array) -> Any:
        qkv = (x @ layer["qkv"]).reshape(batch, 3 * heads, -1)
        q, k, v = jnp.split(qkv, 3, axis=1)
        keys, values = (
            lax.dynamic_update_index_in_dim(old, new, at, 1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        scores = jnp.einsum("bhd,bthd->bht", q, keys) / 8
        scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
        found = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), values)
        return (keys, values), x + found.reshape(batch, width) @ layer["out"]

    def apply(layers: Any, x: jax.Array) -> jax.Array:
        def step(carry: Any, at: jax.Array) -> Any:
            x, caches = carry
            filled = []
            for layer, cache in zip(layers, caches, strict=True):
                cache, x = attend(layer, cache, x, at)
                x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
                x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
                filled.append(cache)
            return (x, filled), x

        zeros = jnp.zeros((batch, length, heads, width // heads))
        return lax.scan(step, (x, [(zeros, zeros)] * 2), jnp.arange(length))[1]

    targets = normal(length, batch, width)
    inputs = (normal(batch, width),)
    return Network(layers, inputs, apply, lambda y: squares(y - targets))


def two_towers() -> Network:
    """Embeddings of words and of what stands around them, or does not."""
    params = {name: 0.1 * normal(20000, 128, seed=len(name)) for name in ("a", "bb")}
    inputs = integers(20000, 1024), integers(20000, 1024), integers(20000, 1024, 10)

    def apply(params: Any, word: Any, near: Any, others: Any) -> Any:
        first, second = params["a"][word], params["bb"]
        good = jnp.einsum("bd,bd->b", first, second[near])
        return good, jnp.einsum("bd,bnd->bn", first, second[others])

    def loss(scores: Any) -> jax.Array:
        good, bad = map(jax.nn.log_sigmoid, (scores[0], -scores[1]))
        return -jnp.mean(good) - jnp.mean(jnp.sum(bad, axis=-1))

    return Network(params, inputs, apply, loss)
