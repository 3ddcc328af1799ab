"""Inference: a model under autocast is exported, stored, loaded and run.

`jax.export` stores the program that autocast has made: whoever loads it needs neither
the model's code nor jamp. Autocast rounds the weights of matrix products and
convolutions to bfloat16 at every call. Stored as bfloat16 they take half the bytes, and
the predictions are the same to the last bit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax import export

import jamp

# Without it XLA may leave out roundings to 16 bits, another time others.
OPTIONS = {"xla_allow_excess_precision": False}
FOLDER = Path(__file__).parent / "output" / "inference"
PROGRAM, WEIGHTS = "program.bin", "weights.msgpack"
IMAGE = (8, 8, 1)


class Result(NamedTuple):
    accuracy: dict[str, float]  # of both sets of weights, on the test images
    weight_bytes: dict[str, int]  # of both, stored
    identical: bool  # whether both give the same logits
    difference: float  # from the logits before storing, relative to the largest
    low_flop_share: float  # of the matrix products and convolutions, in bfloat16


def model(variables: dict, images: jax.Array) -> jax.Array:
    return digits.MODEL.apply(variables, images, train=False)


BFLOAT16 = dict(device_type="gpu", dtype=jnp.bfloat16)
logits_of = jamp.autocast(model, **BFLOAT16)


def train(data: digits.Batch, epochs: int) -> dict:
    """The variables of the model of examples/digits.py, trained as there."""
    optimizer = optax.adamw(2e-3)
    init = jax.jit(digits.MODEL.init, static_argnames="train")
    variables = init(jax.random.key(0), data.images[:1], train=True)
    params, batch_stats = variables["params"], variables["batch_stats"]
    state = digits.TrainState(params, batch_stats, optimizer.init(params))
    train_step = digits.make_train_step(optimizer, {"dtype": jnp.bfloat16})
    for batch in digits.batches(data, epochs, seed=0):
        state, _ = train_step(state, batch)
    return {"params": state.params, "batch_stats": state.batch_stats}


def rounded(variables: dict) -> dict:
    """The variables with the weights of products and convolutions in bfloat16."""

    def maybe_rounded(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(maybe_rounded, variables)


def store(variables: dict, folder: Path) -> None:
    """Writes weights, and a program for batches of any size on CPUs and on GPUs."""
    (size,) = export.symbolic_shape("size")
    images = jax.ShapeDtypeStruct((size, *IMAGE), jnp.float32)
    make = export.export(jax.jit(logits_of), platforms=("cpu", "cuda"))
    (folder / PROGRAM).write_bytes(make(variables, images).serialize())
    (folder / WEIGHTS).write_bytes(serialization.msgpack_serialize(variables))


def load(folder: Path) -> tuple[export.Exported, dict]:
    """What `store` has written, without the code that made it."""
    program = export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    return program, serialization.msgpack_restore((folder / WEIGHTS).read_bytes())


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args(arguments)

    train_data, test_data = digits.load_data()
    trained = train(train_data, args.epochs)
    args.folder.mkdir(parents=True, exist_ok=True)
    weights = {"float32": trained, "bfloat16": rounded(trained)}
    expected = jax.jit(logits_of, compiler_options=OPTIONS)(trained, test_data.images)
    accuracy, weight_bytes, logits = {}, {}, {}
    for name, variables in weights.items():
        store(variables, args.folder)
        program, stored = load(args.folder)
        predict = jax.jit(program.call, compiler_options=OPTIONS)
        logits[name] = np.asarray(predict(stored, test_data.images))
        found = logits[name].argmax(axis=-1)
        accuracy[name] = float(np.mean(found == test_data.labels))
        weight_bytes[name] = (args.folder / WEIGHTS).stat().st_size
        print(
            f"weights in {name}: {weight_bytes[name] / 1024:.0f} KiB, program "
            f"{(args.folder / PROGRAM).stat().st_size / 1024:.0f} KiB, "
            f"test accuracy {accuracy[name]:.2%}"
        )
    share = jamp.explain(model, **BFLOAT16)(trained, test_data.images).low_flop_share
    print(f"matrix products and convolutions in bfloat16: {share:.0%} of their FLOPs")
    identical = np.array_equal(logits["float32"], logits["bfloat16"])
    # A program for batches of any size may add up in another order than one for this.
    largest = np.abs(logits["float32"] - expected).max() / np.abs(expected).max()
    print(f"the same logits from both: {identical}; before storing: {largest:.1%} off")
    return Result(accuracy, weight_bytes, identical, float(largest), share)


if __name__ == "__main__":
    main()
