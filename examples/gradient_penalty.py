"""A gradient penalty: differentiate twice, under autocast and with a scaled loss.

The inner gradients are those of a scaled loss too, so that they don't vanish in
float16; they are unscaled by hand, without a check, before the penalty is formed. An
overflow in them makes the penalty infinite, and the optimizer finds it in the outer
gradients.
"""

import jax
import jax.numpy as jnp
import optax
import teacher

import jamp

TX = jamp.dynamic_loss_scaling(optax.adam(3e-3), jamp.GradScaler(init_scale=2.0**12))


def penalized_loss(
    params: dict, scale: jax.Array, x: jax.Array, y: jax.Array, *, enabled: bool
) -> jax.Array:
    @jamp.autocast(dtype=jnp.float16, enabled=enabled)
    def loss_fn(params: dict) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    grads = jax.grad(lambda params: loss_fn(params) * scale)(params)
    norm = optax.tree.norm(optax.tree.scale(1 / scale, grads))
    return loss_fn(params) + 0.1 * norm


def main(num_steps: int = 60) -> dict[str, float]:
    results = {}
    for name, enabled in (("float32", False), ("float16", True)):
        params = teacher.init(seed=0)
        opt_state = TX.init(params)

        @jax.jit
        def step(params, opt_state, x, y, enabled=enabled):
            scale = jamp.loss_scale(opt_state)
            loss, grads = jamp.value_and_grad(penalized_loss)(
                opt_state, params, scale, x, y, enabled=enabled
            )
            updates, opt_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for number in range(num_steps):
            params, opt_state, loss = step(params, opt_state, *teacher.batch(number))
        results[name] = float(loss)
        print(f"{name}: loss with penalty {results[name]:.4f}")
    return results


if __name__ == "__main__":
    main()
