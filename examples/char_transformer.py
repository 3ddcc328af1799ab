"""A transformer that learns to write Python's documentation, letter by letter.

It is trained twice from the same weights, in float32 and in float16 with loss scaling,
and one can watch both. float16 is what autocast chooses on GPUs; `device_type="gpu"`
asks for the same anywhere. A CPU computes the same, but it is no faster at it.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import watching
from flax import nnx

import jamp

LENGTH, DIM, HEADS = 64, 96, 4
BATCH_SIZE = 16
# Without line breaks and indents, which are much of it and easily learnt.
TEXT = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
ALPHABET = "".join(sorted(set(TEXT)))
LETTERS = np.array([ALPHABET.index(letter) for letter in TEXT], np.int32)
FIGURE = Path(__file__).parent / "output" / "char_transformer.png"


class Block(nnx.Module):
    """Attention to the letters before, then a small network for each letter."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(DIM, 3 * DIM, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, DIM // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Logits of the next letter, after each letter; nothing names a dtype."""

    def __init__(self, depth: int, rngs: nnx.Rngs):
        self.letters = nnx.Embed(len(ALPHABET), DIM, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, len(ALPHABET), rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        x = self.letters(letters) + self.positions(jnp.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.partial(nnx.jit, static_argnums=(0, 1))
def create(depth: int, seed: int) -> Transformer:
    return Transformer(depth, nnx.Rngs(seed))


def make_optimizer(model: Transformer, dtype: str, num_steps: int) -> nnx.Optimizer:
    # The scale begins too high, and soon tries to grow again: there is more to see.
    scaler = jamp.GradScaler(
        init_scale=2.0**24, growth_interval=50, enabled=dtype == "float16"
    )
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 10, num_steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return nnx.Optimizer(model, jamp.dynamic_loss_scaling(inner, scaler), wrt=nnx.Param)


def loss_fn(model: Transformer, letters: jax.Array) -> jax.Array:
    logits = model(letters[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, letters[:, 1:]
    ).mean()


def make_train_step(dtype: str):
    """A jitted step of training that returns what one wants to know of it."""
    cast_loss_fn = jamp.autocast(
        loss_fn, device_type="gpu", dtype=dtype, enabled=dtype != "float32"
    )

    @nnx.jit
    def train_step(
        model: Transformer, optimizer: nnx.Optimizer, letters: jax.Array
    ) -> dict[str, jax.Array]:
        loss, grads = jamp.value_and_grad(cast_loss_fn)(
            optimizer.opt_state, model, letters
        )
        scalars = {"loss": loss, **jamp.metrics(optimizer.opt_state, grads)}
        optimizer.update(model, grads)
        return scalars

    return train_step


def batches(num_steps: int, seed: int):
    """Pieces of the text, from anywhere in it."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        starts = rng.integers(len(LETTERS) - LENGTH, size=BATCH_SIZE)
        yield LETTERS[starts[:, None] + np.arange(LENGTH + 1)]


def train(
    dtype: str, depth: int, num_steps: int, seed: int
) -> tuple[Transformer, watching.Watch]:
    model = create(depth, seed)
    optimizer = make_optimizer(model, dtype, num_steps)
    train_step = make_train_step(dtype)
    with watching.Watch(dtype, num_steps) as watch:
        for letters in batches(num_steps, seed):
            watch.log(train_step(model, optimizer, letters))
    return model, watch


def write(model: Transformer, beginning: str, length: int) -> str:
    """Lets the model go on with a text of `LENGTH` letters."""

    @nnx.jit
    def following(model: Transformer, letters: jax.Array, key: jax.Array) -> jax.Array:
        logits = jamp.autocast(model, device_type="gpu")(letters)
        return jax.random.categorical(key, logits[0, -1] / 0.5)

    letters = [ALPHABET.index(letter) for letter in beginning]
    for step in range(length):
        window = np.array([letters[-LENGTH:]], np.int32)
        letters.append(int(following(model, window, jax.random.key(step))))
    return "".join(ALPHABET[letter] for letter in letters[len(beginning) :])


def main(arguments: Sequence[str] | None = None) -> dict[str, watching.Watch]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--depth", type=int, default=2, help="number of blocks")
    parser.add_argument("--dtype", default="float16", help="of the second run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--letters", type=int, default=300, help="to write at the end")
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PATH")
    args = parser.parse_args(arguments)

    runs = {}
    for name in ("float32", args.dtype):
        model, runs[name] = train(name, args.depth, args.steps, args.seed)
    title = f"A transformer on Python's documentation: {args.steps} steps"
    watching.save_figure(runs, title, args.figure)
    for name, run in runs.items():
        mean = np.mean(run.losses[-20:])
        print(f"{name}: loss {mean:.3f}, {sum(run.skipped)} steps skipped")
    beginning = TEXT[TEXT.index("The basic import statement") :][:LENGTH]
    print(beginning + write(model, beginning, args.letters))
    print(f"Loss and loss scale: {args.figure}")
    return runs


if __name__ == "__main__":
    main()
