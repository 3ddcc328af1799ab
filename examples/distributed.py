"""Parameters and data sharded over devices, trained in float16 in two ways.

With `jax.jit` arrays are global, and loss scaling needs nothing. Under `jax.shard_map`
each device sees the gradients of its own shard of the parameters: `axis_name` makes an
overflow on one device skip the step on all of them.
"""

import jax
import jax.numpy as jnp
import optax
import teacher
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

AXIS = "devices"
OUTPUTS = 8


@jamp.autocast(dtype=jnp.float16)
def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return teacher.squared_error(teacher.predict(params, x), y)


def spec(leaf: jax.Array) -> P:
    """Arrays are sharded over their rows, scalars are on every device."""
    return P(AXIS) if leaf.ndim else P()


def jit_step(tx: optax.GradientTransformationExtraArgs, mesh: Mesh):
    del mesh  # the arguments carry it

    def step(params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def shard_map_step(tx: optax.GradientTransformationExtraArgs, mesh: Mesh):
    def local_loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        gather = lambda shard: jax.lax.all_gather(shard, AXIS, tiled=True)  # noqa: E731
        return loss_fn(jax.tree.map(gather, params), x, y) / mesh.size

    def step(params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
        _, grads = jamp.value_and_grad(local_loss)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def sharded(params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
        arguments = (params, opt_state, x, y)
        specs = jax.tree.map(spec, arguments)
        return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])(
            *arguments
        )

    return sharded


def train(make_step, axis_name: str | None, num_steps: int) -> dict:
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), (jax.sharding.AxisType.Auto,))
    scaler = jamp.GradScaler(init_scale=2.0**20)
    tx = jamp.dynamic_loss_scaling(optax.adam(3e-3), scaler, axis_name=axis_name)
    step = make_step(tx, mesh)

    def sharded(tree):
        return jax.device_put(
            tree, jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), tree)
        )

    params = sharded(teacher.init(seed=0, outputs=OUTPUTS))
    opt_state = sharded(tx.init(params))
    for number in range(num_steps):
        batch = teacher.batch(number, outputs=OUTPUTS)
        params, opt_state = step(params, opt_state, *sharded(batch))
    loss = float(loss_fn(params, *teacher.batch(num_steps, outputs=OUTPUTS)))
    return {"loss": loss, "skipped": int(opt_state.skipped_steps), "params": params}


def main(num_steps: int = 40) -> dict[str, dict]:
    results = {
        "jit": train(jit_step, None, num_steps),
        "shard_map": train(shard_map_step, AXIS, num_steps),
    }
    for name, result in results.items():
        print(f"{name}: loss {result['loss']:.4f}, {result['skipped']} steps skipped")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # without effect on GPUs
    main()
