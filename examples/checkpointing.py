"""Checkpoint and resume with orbax: the run goes on bit for bit as if never stopped."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import teacher

import jamp

SCALER = jamp.GradScaler(init_scale=2.0**20, growth_interval=7)
TX = jamp.dynamic_loss_scaling(optax.adamw(3e-3), SCALER)


@jax.jit
def train_step(train_state: dict, x: jax.Array, y: jax.Array) -> dict:
    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    params, opt_state = train_state["params"], train_state["opt_state"]
    _, grads = jamp.value_and_grad(loss_fn)(opt_state, params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


def train(train_state: dict, steps: range) -> dict:
    for step in steps:
        train_state = train_step(train_state, *teacher.batch(step))
    return train_state


def main() -> bool:
    params = teacher.init(seed=0)
    start = {"params": params, "opt_state": TX.init(params)}
    uninterrupted = train(start, range(40))

    halfway = train(start, range(20))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, halfway)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(path, start)
    resumed = train(restored, range(20, 40))

    same = jax.tree.map(lambda a, b: bool((a == b).all()), uninterrupted, resumed)
    identical = all(jax.tree.leaves(same))
    scale = float(jamp.loss_scale(resumed["opt_state"]))
    print(f"scale {scale:.0f}; bit-identical after resuming: {identical}")
    return identical


if __name__ == "__main__":
    main()
