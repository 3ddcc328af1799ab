"""Two models with a loss and an optimizer each, and one scale for both.

Each optimizer skips its own steps. The scale is updated once per iteration, by whether
either of them overflowed.
"""

import jax
import jax.numpy as jnp
import optax
import teacher

import jamp

SCALER = jamp.GradScaler(init_scale=2.0**12)
OPTIMIZERS = {"adam": optax.adam(3e-3), "sgd": optax.sgd(0.1)}


@jamp.autocast(dtype=jnp.float16)
def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return teacher.squared_error(teacher.predict(params, x), y)


@jax.jit
def train_step(
    models: dict, scaler_state: jamp.ScalerState, data: dict
) -> tuple[dict, jamp.ScalerState, dict, dict]:
    models, losses, found = dict(models), {}, {}
    for name, (params, opt_state) in models.items():
        losses[name], grads = jamp.value_and_grad(loss_fn)(
            scaler_state, params, *data[name]
        )
        grads, found[name] = SCALER.unscale(scaler_state, grads)
        params, opt_state, _ = SCALER.step(
            scaler_state, OPTIMIZERS[name], grads, found[name], opt_state, params
        )
        models[name] = (params, opt_state)
    return models, SCALER.update(scaler_state, found), losses, found


def main(num_steps: int = 60, overflow_in_step: int = 20) -> dict[str, list]:
    models = {}
    for seed, (name, tx) in enumerate(OPTIMIZERS.items(), start=2):
        params = teacher.init(seed)
        models[name] = (params, tx.init(params))
    scaler_state = SCALER.init()
    history = {name: [] for name in ("adam", "sgd", "skipped")}
    for step in range(num_steps):
        x, y = teacher.batch(step)
        data = {"adam": (x, y), "sgd": (x, y)}
        if step == overflow_in_step:
            data["sgd"] = (x * 1e6, y)  # more than float16 holds
        models, scaler_state, losses, found = train_step(models, scaler_state, data)
        for name in OPTIMIZERS:
            history[name].append(float(losses[name]))
            if found[name]:
                history["skipped"].append((step, name))
                scale = float(scaler_state.scale)
                print(f"step {step}: {name} skipped, the scale is now {scale:.0f}")
    for name in OPTIMIZERS:
        print(f"{name}: loss {history[name][0]:.3f} -> {history[name][-1]:.3f}")
    return history


if __name__ == "__main__":
    main()
