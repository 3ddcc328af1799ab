"""Typical training in float16, with Flax's TrainState as it is.

The loss is computed under autocast and scaled; the optimizer unscales the gradients and
skips the steps in which one of them overflowed. The scale is far too large at first, so
the first steps are skipped until it has come down.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import teacher
from flax.training.train_state import TrainState

import jamp


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Dense(teacher.HIDDEN)(x))
        return nn.Dense(1)(x)


MODEL = Model()


@jax.jit
def train_step(
    state: TrainState, x: jax.Array, y: jax.Array
) -> tuple[TrainState, jax.Array]:
    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(state.apply_fn({"params": params}, x), y)

    loss, grads = jamp.value_and_grad(loss_fn)(state.opt_state, state.params)
    return state.apply_gradients(grads=grads), loss


def main(num_steps: int = 100) -> dict[str, float]:
    x, _ = teacher.batch(0)
    scaler = jamp.GradScaler(init_scale=2.0**24, growth_interval=40)
    state = TrainState.create(
        apply_fn=MODEL.apply,
        params=MODEL.init(jax.random.key(0), x)["params"],
        tx=jamp.dynamic_loss_scaling(optax.adam(3e-3), scaler),
    )
    losses = []
    for step in range(num_steps):
        state, loss = train_step(state, *teacher.batch(step))
        losses.append(float(loss))
        if jamp.last_step_skipped(state.opt_state):
            scale = float(jamp.loss_scale(state.opt_state))
            print(f"step {step}: skipped, the scale is now 2**{jnp.log2(scale):.0f}")
    skipped = int(state.opt_state.skipped_steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} steps skipped")
    return {"first": losses[0], "last": losses[-1], "skipped": skipped}


if __name__ == "__main__":
    main()
