"""Typical training in float16 with flax.nnx, whose Optimizer works as it is."""

import jax
import jax.numpy as jnp
import optax
import teacher
from flax import nnx

import jamp


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(teacher.FEATURES, teacher.HIDDEN, rngs=rngs)
        self.outer = nnx.Linear(teacher.HIDDEN, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.gelu(self.inner(x)))


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> jax.Array:
    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(model: Model) -> jax.Array:
        return teacher.squared_error(model(x), y)

    loss, grads = jamp.value_and_grad(loss_fn)(optimizer.opt_state, model)
    optimizer.update(model, grads)
    return loss


def main(num_steps: int = 100) -> dict[str, float]:
    model = Model(nnx.Rngs(0))
    tx = jamp.dynamic_loss_scaling(optax.adam(3e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [
        float(train_step(model, optimizer, *teacher.batch(step)))
        for step in range(num_steps)
    ]
    skipped = int(optimizer.opt_state.skipped_steps[...])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} steps skipped")
    return {"first": losses[0], "last": losses[-1], "skipped": skipped}


if __name__ == "__main__":
    main()
