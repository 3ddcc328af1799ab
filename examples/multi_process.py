"""Two processes that train one model together, as two machines would.

Started without arguments it starts both, on the CPU of this machine. Each has its own
half of every batch, and the arrays under `jax.jit` are global: loss scaling needs
nothing. A batch overflows in one of the processes only, and both skip the step.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
import optax
import teacher
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

PROCESSES = 2
BATCH_SIZE = 32  # of each process
OVERFLOW_IN_STEP = 10
TX = jamp.dynamic_loss_scaling(optax.adam(3e-3), jamp.GradScaler(init_scale=2.0**12))


@jamp.autocast(device_type="gpu")
def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return teacher.squared_error(teacher.predict(params, x), y)


@jax.jit
def train_step(
    params: dict, opt_state: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[dict, optax.OptState, dict[str, jax.Array]]:
    loss, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    scalars = {"loss": loss, **jamp.metrics(opt_state)}
    return optax.apply_updates(params, updates), opt_state, scalars


def train(num_steps: int) -> dict[str, float]:
    """What each of the processes runs."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), (jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    params = jax.device_put(teacher.init(seed=0), everywhere)
    opt_state = jax.device_put(TX.init(params), everywhere)
    losses = []
    for step in range(num_steps):
        # Each process loads its own examples.
        number = step * PROCESSES + jax.process_index()
        x, y = map(np.array, teacher.batch(number, size=BATCH_SIZE))
        if step == OVERFLOW_IN_STEP and jax.process_index() == 1:
            x *= 1e6  # more than float16 holds
        batch = (jax.make_array_from_process_local_data(rows, part) for part in (x, y))
        params, opt_state, scalars = train_step(params, opt_state, *batch)
        losses.append(float(scalars["loss"]))
    return {
        "processes": jax.process_count(),
        "first": losses[0],
        "last": losses[-1],
        "scale": float(scalars["loss_scale"]),
        "skipped": int(scalars["skipped_steps"]),
        "norm": float(optax.tree.norm(params)),
    }


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start(num_steps: int) -> list[dict[str, float]]:
    """Starts the processes and returns what each has got."""
    port = free_port()
    commands = [
        [sys.executable, __file__, "--steps", num_steps, "--join", port, number]
        for number in range(PROCESSES)
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # two processes can't share a GPU
    processes = [
        subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, text=True, env=env
        )
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a process has failed; it said why above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--join", type=int, nargs=2, metavar=("PORT", "PROCESS"))
    args = parser.parse_args(arguments)

    if args.join:
        port, number = args.join
        jax.distributed.initialize(f"localhost:{port}", PROCESSES, number)
        results = [train(args.steps)]
        print(json.dumps(results[0]))
        return results
    results = start(args.steps)
    for number, result in enumerate(results):
        print(
            f"process {number} of {result['processes']}: loss {result['first']:.3f} -> "
            f"{result['last']:.4f}, scale {result['scale']:.0f}, {result['skipped']} "
            f"step skipped, norm of the parameters {result['norm']:.6f}"
        )
    return results


if __name__ == "__main__":
    main()
