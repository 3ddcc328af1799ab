"""One of two processes that train together; prints what it ends up with.

Run as `python two_processes.py PORT PROCESS`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp


def train(port, process):
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, P())
    scaler = jamp.GradScaler(init_scale=2.0**10, growth_interval=2)
    tx = jamp.dynamic_loss_scaling(optax.adam(0.1), scaler)

    @jamp.autocast(device_type="gpu")
    def loss_fn(params, x):
        return ((x @ params) ** 2).mean()

    @jax.jit
    def step(params, opt_state, x):
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(jnp.ones((4, 4)), everywhere)
    opt_state = jax.device_put(tx.init(params), everywhere)
    for number in range(6):
        mine = np.full((2, 4), 1.0 + number + process, np.float32)
        if number == 3 and process == 1:
            mine[0, 0] = np.inf
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), mine)
        params, opt_state = step(params, opt_state, x)
    state = {"params": params, "scaler": opt_state.scaler_state, "inner": opt_state[-1]}
    leaves = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]
    return {
        "leaves": leaves,
        "scale": float(opt_state.scaler_state.scale),
        "skipped": int(opt_state.skipped_steps),
        "processes": jax.process_count(),
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
