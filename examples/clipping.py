"""Gradient clipping: it stands inside the wrapper, where gradients are unscaled.

Shown against float32: whatever the scale, the clipped steps are the same.
"""

import functools

import jax
import optax
import teacher

import jamp

CLIPPED_SGD = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))


@functools.partial(jax.jit, static_argnames="scaler")
def train(
    params: dict, x: jax.Array, y: jax.Array, scaler: jamp.GradScaler
) -> dict[str, jax.Array]:
    tx = jamp.dynamic_loss_scaling(CLIPPED_SGD, scaler)

    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    def step(carry: tuple, _: None) -> tuple:
        params, opt_state = carry
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=20)
    return params


def main() -> dict[float, float]:
    params, (x, y) = teacher.init(seed=0), teacher.batch(0)
    unscaled = train(params, x, y, jamp.GradScaler(enabled=False))
    differences = {}
    for scale in (1.0, 2.0**10, 2.0**16):
        scaled = train(params, x, y, jamp.GradScaler(init_scale=scale))
        difference = optax.tree.norm(optax.tree.sub(scaled, unscaled))
        differences[scale] = float(difference / optax.tree.norm(unscaled))
        print(f"scale {scale:6.0f}: parameters differ by {differences[scale]:.1e}")
    return differences


if __name__ == "__main__":
    main()
