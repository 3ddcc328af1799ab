"""What a small network is, and the parts that several have."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

KEY = jax.random.key(0)


class Network(NamedTuple):
    params: Any
    inputs: tuple[jax.Array, ...]
    apply: Callable[..., Any]  # a function of the parameters and the inputs
    loss: Callable[[Any], jax.Array]  # of what it returns


def normal(*shape: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(below: int, *shape: int, seed: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def squares(outputs: jax.Array) -> jax.Array:
    return jnp.mean(outputs**2)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_module(
    model: nn.Module, *inputs: jax.Array, loss: Callable[[Any], jax.Array] = squares
) -> Network:
    """A module of Flax with dropout and statistics as in training."""
    variables = model.init({"params": KEY, "dropout": KEY}, *inputs)
    params = variables.pop("params")
    state = [*variables]

    def apply(params: Any, *inputs: jax.Array) -> Any:
        outputs = model.apply(
            {"params": params, **variables},
            *inputs,
            rngs={"dropout": KEY},
            mutable=state,
        )
        return outputs[0]

    return Network(params, inputs, apply, loss)


def classifier(model: nn.Module, inputs: jax.Array, classes: int) -> Network:
    """A module of Flax that learns the classes of pictures, nodes or texts."""
    labels = integers(classes, len(inputs))
    return of_module(model, inputs, loss=lambda y: cross_entropy(y, labels))


class Block(nn.Module):
    """A layer of a transformer, with cross attention if there is a context."""

    width: int
    heads: int
    dropout: float = 0.1

    @nn.compact
    def __call__(
        self, x: jax.Array, context: Any = None, mask: Any = None
    ) -> jax.Array:
        attention = partial(
            nn.MultiHeadDotProductAttention,
            num_heads=self.heads,
            dropout_rate=self.dropout,
            deterministic=False,
        )
        drop = nn.Dropout(self.dropout, deterministic=False)
        y = nn.LayerNorm()(x)
        x = x + drop(attention()(y, y, mask=mask))
        if context is not None:
            x = x + drop(attention()(nn.LayerNorm()(x), context))
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(self.width)(y))


def normed(x: jax.Array) -> jax.Array:
    return nn.BatchNorm(use_running_average=False)(x)
