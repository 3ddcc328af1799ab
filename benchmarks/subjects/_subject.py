"""What a subject of the step benchmark is: a Flax model, a batch, a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax


@dataclass(frozen=True)
class Subject:
    """A model with what it is trained on.

    Attributes:
      model: `model(dtype, train)` is the Flax module: with None as dtype as one writes
        it in float32, with a 16-bit dtype as one writes it in mixed precision by hand.
      inputs: the batch that goes into the model.
      targets: what the loss compares the outputs with, if anything.
      loss: `loss(outputs, targets)`, of float32 outputs, is a scalar.
      optimizer: a name in `rivals.optimizers.OPTAX`.
      fused: as `model`, with cuDNN's attention in 16 bits; None if it has no attention.
    """

    model: Callable[[Any, bool], nn.Module]
    inputs: np.ndarray
    targets: np.ndarray | None
    loss: Callable[[jax.Array, Any], jax.Array]
    optimizer: str
    fused: Callable[[Any, bool], nn.Module] | None = None

    def init(self) -> tuple[Any, Any]:
        """Parameters, and the other variables, such as the statistics of BatchNorm."""
        shape = jax.ShapeDtypeStruct(self.inputs.shape, self.inputs.dtype)
        variables = self.model(None, True).lazy_init(jax.random.key(0), shape)
        return variables.pop("params"), variables


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean squared difference."""
    return ((outputs - targets) ** 2).mean()


def make_text(vocabulary: int, batch: int, length: int) -> tuple[Any, Any]:
    """Random tokens, and for each the one that follows it."""
    text = np.random.default_rng(0).integers(
        vocabulary, size=(batch, length + 1), dtype=np.int32
    )
    return text[:, :-1], text[:, 1:]


def make_images(batch: int, pixels: int, classes: int) -> tuple[Any, Any]:
    """Random images, channels last, and their labels."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, pixels, pixels, 3), np.float32)
    return images, rng.integers(classes, size=batch, dtype=np.int32)
