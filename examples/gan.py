"""A GAN that draws digits, in float16: two networks, two losses, two optimizers.

Each optimizer has its own loss scale, because the gradients of the two losses differ in
size: a step that overflows in one network is skipped there and goes on in the other.
(examples/two_models.py has one scale for both, as PyTorch's documentation does.)
float16 is what autocast chooses on GPUs; `device_type="gpu"` asks for it anywhere.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import Batch, batches, load_data
from flax.training.train_state import TrainState
from matplotlib.figure import Figure

import jamp

NOISE = 32
FIGURE = Path(__file__).parent / "output" / "gan.png"


class Generator(nn.Module):
    """Draws images float[batch, 8, 8, 1] from noise; nothing names a dtype."""

    @nn.compact
    def __call__(self, noise: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(noise))
        x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(256)(x)))
        return nn.sigmoid(nn.Dense(64)(x)).reshape(-1, 8, 8, 1)


class Discriminator(nn.Module):
    """Tells real images from drawn ones: a logit for each, high for real."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        x = nn.leaky_relu(nn.Dense(256)(x))
        x = nn.leaky_relu(nn.Dense(128)(x))
        return nn.Dense(1)(x)[:, 0]


class Players(NamedTuple):
    generator: TrainState
    discriminator: TrainState


class Result(NamedTuple):
    players: Players
    losses: dict[str, np.ndarray]  # of every step
    distances: tuple[
        float, float
    ]  # of the mean image to the real one, before and after


def autocast(dtype: str):
    return functools.partial(
        jamp.autocast, device_type="gpu", dtype=dtype, enabled=dtype != "float32"
    )


def draw(generator: TrainState, params: dict, noise: jax.Array) -> jax.Array:
    return generator.apply_fn({"params": params}, noise)


def cross_entropy(logits: jax.Array, real: float) -> jax.Array:
    labels = jnp.full_like(logits, real)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


@functools.partial(jax.jit, static_argnames="dtype")
def train_step(
    players: Players, images: jax.Array, key: jax.Array, dtype: str
) -> tuple[Players, dict[str, jax.Array]]:
    """One step of the discriminator, then one of the generator."""
    generator, discriminator = players
    noise = jax.random.normal(key, (2, len(images), NOISE))

    @autocast(dtype)
    def discriminator_loss(params: dict) -> jax.Array:
        judge = functools.partial(discriminator.apply_fn, {"params": params})
        drawn = draw(generator, generator.params, noise[0])
        # Labels a little below one keep the discriminator from being too sure.
        return cross_entropy(judge(images), 0.9) + cross_entropy(judge(drawn), 0.0)

    loss, grads = jamp.value_and_grad(discriminator_loss)(
        discriminator.opt_state, discriminator.params
    )
    losses = {"discriminator": loss}
    discriminator = discriminator.apply_gradients(grads=grads)

    @autocast(dtype)
    def generator_loss(params: dict) -> jax.Array:
        drawn = draw(generator, params, noise[1])
        logits = discriminator.apply_fn({"params": discriminator.params}, drawn)
        return cross_entropy(logits, 1.0)

    losses["generator"], grads = jamp.value_and_grad(generator_loss)(
        generator.opt_state, generator.params
    )
    generator = generator.apply_gradients(grads=grads)
    return Players(generator, discriminator), losses


def create(dtype: str, seed: int) -> Players:
    scaler = jamp.GradScaler(
        init_scale=2.0**24, growth_interval=200, enabled=dtype == "float16"
    )
    tx = jamp.dynamic_loss_scaling(optax.adam(5e-4, b1=0.5), scaler)

    def player(model: nn.Module, example: jax.Array, seed: int) -> TrainState:
        params = jax.jit(model.init)(jax.random.key(seed), example)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return Players(
        player(Generator(), jnp.zeros((1, NOISE)), 2 * seed + 1),
        player(Discriminator(), jnp.zeros((1, 8, 8, 1)), 2 * seed + 2),
    )


def sample(generator: TrainState, dtype: str, count: int) -> np.ndarray:
    noise = jax.random.normal(jax.random.key(0), (count, NOISE))
    drawn = jax.jit(autocast(dtype)(draw))(generator, generator.params, noise)
    return np.asarray(drawn, np.float32)


def distance(players: Players, dtype: str, data: Batch) -> float:
    drawn = sample(players.generator, dtype, 256)
    return float(np.abs(drawn.mean(axis=0) - data.images.mean(axis=0)).mean())


def train(data: Batch, epochs: int, dtype: str, seed: int) -> Result:
    players = create(dtype, seed)
    before, losses = distance(players, dtype, data), []
    for step, batch in enumerate(batches(data, epochs, seed)):
        key = jax.random.key(step)
        players, both = train_step(players, batch.images, key, dtype)
        losses.append(both)
    stacked = jax.tree.map(lambda *values: np.array(values), *losses)
    return Result(players, stacked, (before, distance(players, dtype, data)))


def save_figure(real: np.ndarray, drawn: np.ndarray, path: Path) -> None:
    """Real digits on the left, drawn ones on the right, eight by eight."""
    figure = Figure(figsize=(8, 4.3), layout="constrained")
    sides = {"real": real, "drawn by the network": drawn}
    for axes, (title, images) in zip(figure.subplots(1, 2), sides.items(), strict=True):
        padded = np.pad(images[:64, :, :, 0], ((0, 0), (1, 1), (1, 1)))
        mosaic = padded.reshape(8, 8, 10, 10).transpose(0, 2, 1, 3).reshape(80, 80)
        axes.imshow(mosaic, cmap="gray", vmin=0, vmax=1)
        axes.set_title(title)
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PATH")
    args = parser.parse_args(arguments)

    data, _ = load_data()
    result = train(data, args.epochs, args.dtype, args.seed)
    for name, state in result.players._asdict().items():
        logged = jamp.metrics(state)
        print(
            f"{name}: loss {result.losses[name][-10:].mean():.3f}, scale "
            f"{logged['loss_scale']:.0f}, {logged['skipped_steps']} of "
            f"{logged['total_steps']} steps skipped"
        )
    before, after = result.distances
    print(f"mean drawn image, distance to the real one: {before:.3f} -> {after:.3f}")
    drawn = sample(result.players.generator, args.dtype, 64)
    save_figure(data.images, drawn, args.figure)
    print(f"Drawn digits: {args.figure}")
    return result


if __name__ == "__main__":
    main()
