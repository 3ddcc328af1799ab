"""Loss scaling by hand, as torch's loop has it, without an optimizer library."""

import jax
import jax.numpy as jnp
import teacher

import jamp

LEARNING_RATE = 0.1
SCALER = jamp.GradScaler(init_scale=2.0**20, growth_interval=50)


@jax.jit
def train_step(
    params: dict, state: jamp.ScalerState, x: jax.Array, y: jax.Array
) -> tuple[dict, jamp.ScalerState, jax.Array]:
    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    loss, scaled_grads = jamp.value_and_grad(loss_fn)(state, params)
    grads, found_inf = SCALER.unscale(state, scaled_grads)
    params = jax.tree.map(
        lambda p, g: jnp.where(found_inf, p, p - LEARNING_RATE * g), params, grads
    )
    return params, SCALER.update(state, found_inf), loss


def main(num_steps: int = 100) -> dict[str, float]:
    params, state = teacher.init(seed=0), SCALER.init()
    losses = []
    for step in range(num_steps):
        params, state, loss = train_step(params, state, *teacher.batch(step))
        losses.append(float(loss))
    scale = float(state.scale)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {scale:.0f}")
    return {"first": losses[0], "last": losses[-1], "scale": scale}


if __name__ == "__main__":
    main()
