"""ResNet in Flax linen: bottleneck blocks with BatchNorm (He et al. 2015)."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax

from ._task import Task, drawn, noisy_patterns


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, projected if shapes differ."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        def conv(features, size, stride, x):
            return nn.Conv(features, (size, size), (stride, stride), use_bias=False)(x)

        def norm(x):
            return nn.BatchNorm(not train, momentum=0.9)(x)

        y = nn.relu(norm(conv(self.width, 1, 1, x)))
        y = nn.relu(norm(conv(self.width, 3, self.stride, y)))
        y = norm(conv(4 * self.width, 1, 1, y))
        if x.shape != y.shape:
            x = norm(conv(4 * self.width, 1, self.stride, x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem of stride 4, stages of bottleneck blocks, and a linear classifier."""

    widths: tuple[int, ...] = (8, 16)
    blocks: tuple[int, ...] = (2, 1)
    classes: int = 8

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(16, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, (width, blocks) in enumerate(
            zip(self.widths, self.blocks, strict=True)
        ):
            for block in range(blocks):
                x = Bottleneck(width, 2 if stage and not block else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def make_task() -> Task:
    """Classification of noisy patterns, by SGD with momentum."""
    model = ResNet()
    rng = np.random.default_rng(0)
    # With statistics of smaller batches, float32 from weights moved by a rounding ends
    # as far away as 16 bits do.
    batches = noisy_patterns(rng, model.classes, (32, 32, 3), 1.0, 64)
    init = functools.partial(model.init, train=True)
    shapes = jax.eval_shape(init, jax.random.key(0), batches[0][0])
    variables = drawn(shapes, np.random.default_rng(0))

    def loss_fn(params, stats, batch):
        images, labels = batch
        logits, updates = model.apply(
            {"params": params, "batch_stats": stats},
            images,
            True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    optimizer = optax.sgd(0.02, momentum=0.9, nesterov=True)
    return Task(
        loss_fn, variables["params"], variables["batch_stats"], batches, optimizer
    )
