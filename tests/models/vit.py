"""Vision Transformer in Equinox, with pre-norm blocks (Dosovitskiy et al. 2020)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ._task import Task, drawn, noisy_patterns

eqx = pytest.importorskip("equinox")


class Block(eqx.Module):
    """Self-attention and a perceptron, each on a LayerNorm and beside a shortcut."""

    norms: tuple
    attention: eqx.nn.MultiheadAttention
    perceptron: eqx.nn.MLP

    def __init__(self, dim, heads, key):
        keys = jax.random.split(key)
        self.norms = (eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim))
        self.attention = eqx.nn.MultiheadAttention(heads, dim, key=keys[0])
        self.perceptron = eqx.nn.MLP(
            dim, dim, 4 * dim, 1, activation=jax.nn.gelu, key=keys[1]
        )

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.perceptron)(jax.vmap(self.norms[1])(x))


class ViT(eqx.Module):
    """Patches as tokens, a class token, learned positions, and a linear classifier."""

    patches: eqx.nn.Conv2d
    class_token: jax.Array
    positions: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key, dim=48, heads=4, depth=2, size=16, patch=4, classes=8):
        keys = jax.random.split(key, depth + 4)
        tokens = (size // patch) ** 2 + 1
        self.patches = eqx.nn.Conv2d(3, dim, patch, patch, key=keys[0])
        self.class_token = 0.02 * jax.random.normal(keys[1], (1, dim))
        self.positions = 0.02 * jax.random.normal(keys[2], (tokens, dim))
        self.blocks = [Block(dim, heads, key) for key in keys[4:]]
        self.norm = eqx.nn.LayerNorm(dim)
        self.head = eqx.nn.Linear(dim, classes, key=keys[3])

    def __call__(self, image):
        patches = self.patches(image.transpose(2, 0, 1))
        tokens = patches.reshape(patches.shape[0], -1).T
        x = jnp.concatenate([self.class_token, tokens]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


def make_task() -> Task:
    """Classification of noisy patterns, by AdamW."""
    batches = noisy_patterns(np.random.default_rng(1), 8, (16, 16, 3), 2.0, 16)
    model = eqx.filter_eval_shape(ViT, jax.random.key(1))
    shapes, static = eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))
    params = drawn(shapes, np.random.default_rng(1))

    def loss_fn(params, state, batch):
        images, labels = batch
        logits = jax.vmap(eqx.combine(params, static))(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), state

    optimizer = optax.adamw(2e-3, weight_decay=0.05)
    return Task(loss_fn, params, None, batches, optimizer)
