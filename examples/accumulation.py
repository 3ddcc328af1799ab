"""Gradient accumulation: optax.MultiSteps inside the wrapper.

The scale stays as it is while the gradients of four micro-batches are averaged; then
one step is taken. An overflow in any of the four skips the whole batch, and leaves
nothing behind.
"""

import jax
import jax.numpy as jnp
import optax
import teacher

import jamp

MICRO_BATCHES = 4
TX = jamp.dynamic_loss_scaling(
    optax.MultiSteps(optax.adam(3e-3), every_k_schedule=MICRO_BATCHES),
    jamp.GradScaler(init_scale=2.0**12),
)


@jax.jit
def micro_step(
    params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[dict, optax.OptState, jax.Array]:
    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    loss, grads = jamp.value_and_grad(loss_fn)(opt_state, params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(num_batches: int = 30, overflow_in_batch: int = 7) -> dict[str, float]:
    params = teacher.init(seed=0)
    opt_state = TX.init(params)
    losses, moved = [], []
    for number in range(num_batches):
        before = params
        for micro in range(MICRO_BATCHES):
            x, y = teacher.batch(number * MICRO_BATCHES + micro, size=16)
            if number == overflow_in_batch and micro == 1:
                x = x * 1e6  # more than float16 holds
            params, opt_state, loss = micro_step(params, opt_state, x, y)
        losses.append(float(loss))
        moved.append(bool(optax.tree.norm(optax.tree.sub(params, before)) > 0))
    skipped = [number for number, stepped in enumerate(moved) if not stepped]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, skipped batches: {skipped}")
    return {"first": losses[0], "last": losses[-1], "skipped": skipped}


if __name__ == "__main__":
    main()
