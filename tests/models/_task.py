"""What a training task is: a model's loss, where it starts, and what it learns from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

STEPS = 20


class Task(NamedTuple):
    """A model to train for `STEPS` steps.

    Attributes:
        loss_fn: Takes parameters, state and a batch; returns the loss and new state.
        params: The initial parameters.
        state: What the model keeps beside them, such as running statistics.
        batches: A batch for each step.
        optimizer: The paper's kind of optimizer.
    """

    loss_fn: Callable[[Any, Any, Any], tuple[Any, Any]]
    params: Any
    state: Any
    batches: list[Any]
    optimizer: optax.GradientTransformation


def drawn(shapes: Any, rng: np.random.Generator) -> Any:
    """Weights of these shapes, each by its name.

    To compile what libraries draw theirs with takes longer than to train with them.
    """

    def draw(path: Any, leaf: Any) -> np.ndarray:
        name, shape = jax.tree_util.keystr(path), leaf.shape
        if "norm" in name.lower():
            ones = any(part in name for part in ("scale", "weight", "var"))
            return np.full(shape, float(ones), leaf.dtype)
        if "bias" in name:
            return np.zeros(shape, leaf.dtype)
        std = 0.02  # of what is added or looked up
        if "kernel" in name or "weight" in name:
            # Equinox has the outputs first, Flax has them last.
            std = (leaf.size // shape[0 if "weight" in name else -1]) ** -0.5
        return (std * rng.standard_normal(shape)).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


def noisy_patterns(
    rng: np.random.Generator,
    classes: int,
    shape: tuple[int, ...],
    noise: float,
    size: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of images, with labels: a coarse pattern for each class, under noise."""
    coarse = rng.standard_normal((classes, shape[0] // 4, shape[1] // 4, shape[2]))
    patterns = coarse.repeat(4, axis=1).repeat(4, axis=2)
    batches = []
    for _ in range(STEPS):
        labels = rng.integers(classes, size=size)
        images = patterns[labels] + noise * rng.standard_normal((size, *shape))
        batches.append((images.astype(np.float32), labels))
    return batches


def sentences(
    rng: np.random.Generator, vocabulary: int, length: int, size: int
) -> list[np.ndarray]:
    """Batches of token sequences from a Markov chain with few likely successors."""
    logits = 3 * rng.standard_normal((vocabulary, vocabulary))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    bounds = chances.cumsum(-1)
    batches = []
    for _ in range(STEPS):
        tokens = np.empty((size, length), np.int32)
        tokens[:, 0] = rng.integers(vocabulary, size=size)
        for t in range(1, length):
            draws = rng.random((size, 1))
            following = (bounds[tokens[:, t - 1]] < draws).sum(-1)
            tokens[:, t] = np.minimum(following, vocabulary - 1)
        batches.append(tokens)
    return batches
