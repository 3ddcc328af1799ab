"""An LSTM that learns to add: two loops in one program, and TensorBoard to watch it.

The network reads a sequence of numbers, two of which are marked, and has to tell their
sum. Both its loop over the sequence and the loop over the training steps are
`jax.lax.scan`s, under autocast as everywhere; `jamp.metrics` come out of the outer one
step by step, without waiting for the device. `--logdir` writes them for TensorBoard.
float16 is what autocast chooses on GPUs; `device_type="gpu"` asks for it anywhere.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp

LENGTH, BATCH_SIZE, HIDDEN = 20, 64, 64
STEPS_PER_CALL = 100


class Adder(nn.Module):
    """Reads float32[batch, time, 2], numbers and marks; nothing names a dtype."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        outputs = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x)
        return nn.Dense(1)(outputs[:, -1])[:, 0]


MODEL = Adder()


def make_batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers from 0 to 1; one in the first half is marked, and one in the second."""
    keys = jax.random.split(key, 3)
    numbers = jax.random.uniform(keys[0], (BATCH_SIZE, LENGTH))
    halves = [
        jax.nn.one_hot(jax.random.randint(k, BATCH_SIZE, 0, LENGTH // 2), LENGTH // 2)
        for k in keys[1:]
    ]
    marks = jnp.concatenate(halves, axis=1)
    return jnp.stack([numbers, marks], axis=-1), jnp.sum(numbers * marks, axis=1)


def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((MODEL.apply(params, x) - y) ** 2)


def make_train_steps(tx: optax.GradientTransformationExtraArgs, dtype: str):
    """A jitted function that trains for a hundred steps, and returns their metrics."""
    cast_loss_fn = jamp.autocast(
        loss_fn, device_type="gpu", dtype=dtype, enabled=dtype != "float32"
    )

    def train_step(carry: tuple, key: jax.Array) -> tuple[tuple, dict]:
        params, opt_state = carry
        loss, grads = jamp.value_and_grad(cast_loss_fn)(
            opt_state, params, *make_batch(key)
        )
        scalars = {"loss": loss, **jamp.metrics(opt_state, grads)}
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), scalars

    return jax.jit(functools.partial(jax.lax.scan, train_step))


def train(num_steps: int, dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Trains and returns the metrics of all steps."""
    scaler = jamp.GradScaler(enabled=dtype == "float16", growth_interval=200)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    tx = jamp.dynamic_loss_scaling(inner, scaler)
    init, *keys = jax.random.split(
        jax.random.key(seed), 1 + num_steps // STEPS_PER_CALL
    )
    params = jax.jit(MODEL.init)(init, make_batch(init)[0])
    carry, train_steps = (params, tx.init(params)), make_train_steps(tx, dtype)
    parts = []
    for key in keys:
        carry, scalars = train_steps(carry, jax.random.split(key, STEPS_PER_CALL))
        parts.append(scalars)
    return jax.tree.map(lambda *values: np.concatenate(values), *parts)


def write_events(folder: Path, metrics: dict[str, np.ndarray]) -> None:
    """Writes metrics where `tensorboard --logdir` finds them."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(len(metrics["loss"])):
            for name, values in metrics.items():
                if np.isfinite(values[step]):  # the norm of a skipped step is not
                    writer.add_scalar(name, values[step], step)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="a multiple of 100")
    parser.add_argument("--dtype", default="float16", help="of the second run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, help="needs tensorboardX")
    args = parser.parse_args(arguments)

    runs = {}
    for name in ("float32", args.dtype):
        runs[name] = metrics = train(args.steps, name, args.seed)
        losses = metrics["loss"]
        print(
            f"{name}: loss {losses[0]:.4f} -> {losses[-20:].mean():.4f} (0.167 is "
            f"guessing), scale {metrics['loss_scale'][-1]:.0f}, "
            f"{np.sum(~np.isfinite(metrics['grad_norm']))} steps skipped"
        )
        if args.logdir:
            write_events(args.logdir / name, metrics)
    return runs


if __name__ == "__main__":
    main()
