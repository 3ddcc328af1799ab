"""A residual network with BatchNorm, in float32 and in float16, with Flax's TrainState.

What is new beside examples/digits.py: the loss is scaled, and BatchNorm's statistics
live in the TrainState. float16 is what autocast chooses on GPUs; `device_type="gpu"`
asks for the same anywhere. Both runs start from the same weights.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from digits import Batch, batches, load_data
from flax.training import train_state

import jamp


class TrainState(train_state.TrainState):
    batch_stats: Any


class Result(NamedTuple):
    accuracy: float  # on the test images
    losses: np.ndarray  # of every step
    skipped: int  # steps
    dtypes: set[str]  # of everything that training keeps


class ResidualBlock(nn.Module):
    """Two convolutions around which the input goes, halved in size if they halve it."""

    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        y = nn.relu(norm()(conv((3, 3), strides=self.strides)(x)))
        # Each block begins as the identity.
        y = norm(scale_init=nn.initializers.zeros)(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), strides=self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Two stages of one block each; nothing names a dtype."""

    stages: tuple[tuple[int, int], ...] = ((16, 1), (32, 2))  # features and strides

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        for features, strides in self.stages:
            x = ResidualBlock(features, strides)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


MODEL = ResNet()


def autocast(dtype: str):
    return functools.partial(
        jamp.autocast, device_type="gpu", dtype=dtype, enabled=dtype != "float32"
    )


def make_train_step(dtype: str):
    @autocast(dtype)
    def loss_fn(
        params: dict, batch_stats: dict, batch: Batch
    ) -> tuple[jax.Array, dict]:
        logits, updates = MODEL.apply(
            {"params": params, "batch_stats": batch_stats},
            batch.images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(), updates["batch_stats"]

    @jax.jit
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        (loss, batch_stats), grads = jamp.value_and_grad(loss_fn, has_aux=True)(
            state.opt_state, state.params, state.batch_stats, batch
        )
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return train_step


def measure_accuracy(state: TrainState, data: Batch, dtype: str) -> float:
    @jax.jit
    @autocast(dtype)
    def predict(variables: dict, images: jax.Array) -> jax.Array:
        return MODEL.apply(variables, images, train=False).argmax(axis=-1)

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return float(np.mean(predict(variables, data.images) == data.labels))


def create(dtype: str, images: np.ndarray, seed: int) -> TrainState:
    init = jax.jit(MODEL.init, static_argnames="train")
    variables = init(jax.random.key(seed), images, train=True)
    scaler = jamp.GradScaler(enabled=dtype == "float16")
    return TrainState.create(
        apply_fn=MODEL.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=jamp.dynamic_loss_scaling(optax.adamw(1e-2), scaler),
    )


def train(epochs: int, dtype: str, seed: int) -> Result:
    train_data, test_data = load_data()
    state = create(dtype, train_data.images[:1], seed)
    train_step, losses = make_train_step(dtype), []
    for batch in batches(train_data, epochs, seed):
        state, loss = train_step(state, batch)
        losses.append(loss)
    kept = jax.tree.leaves((state.params, state.batch_stats, state.opt_state))
    return Result(
        accuracy=measure_accuracy(state, test_data, dtype),
        losses=np.array(losses),
        skipped=int(state.opt_state.skipped_steps),
        dtypes={leaf.dtype.name for leaf in kept if leaf.dtype.kind == "f"},
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--dtype", default="float16", help="of the second run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    results = {}
    for name in ("float32", args.dtype):
        results[name] = result = train(args.epochs, name, args.seed)
        print(
            f"{name}: test accuracy {result.accuracy:.2%}, loss "
            f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f}, "
            f"{result.skipped} steps skipped"
        )
    return results


if __name__ == "__main__":
    main()
