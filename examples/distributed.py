"""Training on several devices in float16, in three ways that come to the same.

Data parallel: every device has all parameters and a part of the batch. Fully sharded:
every device has a part of the parameters and of the optimizer's state too. With
`jax.jit` arrays are global, and loss scaling needs nothing. Under `jax.shard_map` each
device sees the gradients of its own shard of the parameters: `axis_name` makes an
overflow on one device skip the step on all of them. One batch overflows, on one device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import teacher
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

AXIS = "devices"
OUTPUTS = 8
OVERFLOW_IN_STEP = 10


class Result(NamedTuple):
    loss: float
    skipped: int  # steps
    params: dict
    bytes_per_device: int  # of parameters and optimizer state


def make_loss(dtype: str):
    @functools.partial(
        jamp.autocast, device_type="gpu", dtype=dtype, enabled=dtype != "float32"
    )
    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return teacher.squared_error(teacher.predict(params, x), y)

    return loss_fn


def rows(leaf: jax.Array) -> P:
    """Arrays are sharded over their rows, scalars are on every device."""
    return P(AXIS) if leaf.ndim else P()


def everywhere(leaf: jax.Array) -> P:
    del leaf
    return P()


def jit_step(
    loss_fn: Callable,
    tx: optax.GradientTransformationExtraArgs,
    mesh: jax.sharding.Mesh,
):
    del mesh  # the arguments carry it

    @jax.jit
    def step(params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def shard_map_step(
    loss_fn: Callable,
    tx: optax.GradientTransformationExtraArgs,
    mesh: jax.sharding.Mesh,
):
    def local_loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        gather = functools.partial(jax.lax.all_gather, axis_name=AXIS, tiled=True)
        return loss_fn(jax.tree.map(gather, params), x, y) / mesh.size

    def step(params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
        _, grads = jamp.value_and_grad(local_loss)(opt_state, params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def sharded(*arguments: Any):
        specs = jax.tree.map(rows, arguments)
        return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])(
            *arguments
        )

    return sharded


def train(
    make_step: Callable,
    spec: Callable,
    axis_name: str | None,
    num_steps: int,
    dtype: str = "float16",
    seed: int = 0,
) -> Result:
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), (jax.sharding.AxisType.Auto,))
    scaler = jamp.GradScaler(init_scale=2.0**12, enabled=dtype == "float16")
    tx = jamp.dynamic_loss_scaling(optax.adam(3e-3), scaler, axis_name=axis_name)
    loss_fn = make_loss(dtype)
    step = make_step(loss_fn, tx, mesh)

    def put(tree: Any, spec: Callable) -> Any:
        return jax.device_put(
            tree, jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), tree)
        )

    # The teacher is the network of seed 1.
    params = put(teacher.init(2 * seed, outputs=OUTPUTS), spec)
    opt_state = put(tx.init(params), spec)
    for number in range(num_steps):
        x, y = teacher.batch(number, outputs=OUTPUTS)
        if number == OVERFLOW_IN_STEP and dtype == "float16":
            x = x.at[0].multiply(1e6)  # more than float16 holds
        params, opt_state = step(params, opt_state, *put((x, y), rows))
        # On CPUs devices that wait for each other share a few threads, which the steps
        # under way at once may all have taken.
        jax.block_until_ready(opt_state)
    return Result(
        loss=float(loss_fn(params, *teacher.batch(num_steps, outputs=OUTPUTS))),
        skipped=int(opt_state.skipped_steps),
        params=params,
        bytes_per_device=sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves((params, opt_state))
        ),
    )


def main(num_steps: int = 40) -> dict[str, Result]:
    results = {
        "data parallel": train(jit_step, everywhere, None, num_steps),
        "fully sharded": train(jit_step, rows, None, num_steps),
        "fully sharded, shard_map": train(shard_map_step, rows, AXIS, num_steps),
    }
    for name, result in results.items():
        print(
            f"{name}: loss {result.loss:.4f}, {result.skipped} step skipped, "
            f"{result.bytes_per_device / 1024:.1f} KiB on each device"
        )
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # without effect on GPUs
    main()
