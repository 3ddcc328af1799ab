"""The kernel in Pallas for Mosaic GPU, for NVIDIA GPUs from Hopper on."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jamp.pallas_kernels.unscale import launches
from jamp.pallas_kernels.unscale.launches import Launch, Request, Results

_INTERPRET: Any = getattr(plgpu, "InterpretGPUParams", None)
if _INTERPRET is None:
    # JAX 0.10 can't lower a kernel that writes through a reference of its caller.
    raise ImportError("it needs JAX 0.11")

MINIMUM_CAPABILITY = 9.0

# The copy engine moves tiles of rows; 64 divides the size of nearly every leaf of a
# model. A block keeps one tile of 64 rows in shared memory, at most 16 KiB, so that a
# dozen blocks share a processor and their loads overlap.
WIDTH, ROWS = 64, 64
# Each leaf of a launch has two branches of its own in the kernel, and two descriptors
# of the copy engine, and takes the longer to compile the more there are.
MOST_LEAVES = 16


def takes(leaf: jax.Array) -> bool:
    # JAX has no references to what varies over the axes of a checked shard_map.
    return launches.fits(leaf, WIDTH) and not launches.varying(leaf).varying


def run(leaves: Sequence[jax.Array], inv_scale: jax.Array, request: Request) -> Results:
    def call(launch: Launch, leaves: list[jax.Array]) -> Any:
        rows = [leaf.reshape(-1, WIDTH) for leaf in leaves]
        grid = (launch.starts[-1],)
        kind = launches.varying(inv_scale, *rows)
        kernel = plgpu.kernel(
            _kernel(launch, request),
            out_type=[jax.ShapeDtypeStruct(grid, jnp.float32, manual_axis_type=kind)],
            scratch_types=[plgpu.SMEM((ROWS, WIDTH), rows[0].dtype), plgpu.Barrier()],
            grid=grid,
            grid_names=("program",),
            interpret=_INTERPRET() if request.interpret else None,
        )
        # What is written through a reference is written in place.
        refs = [jax.new_ref(x) for x in rows] if request.unscale else []
        (found,) = kernel(inv_scale.reshape(1), *(refs or rows))
        return [jax.freeze(ref) for ref in refs], found

    return launches.run_launches(leaves, ROWS * WIDTH, MOST_LEAVES, call)


def _kernel(launch: Launch, request: Request) -> Any:
    count = len(launch.sizes)

    def kernel(scale_ref: Any, *refs: Any) -> None:
        arrays, (found_ref, tile_ref, barrier) = refs[:count], refs[count:]
        program = jax.lax.axis_index("program")

        def place(k: int, tile: Any) -> Any:
            # Rows beyond the end are read as zeros and not written.
            return arrays[k].at[pl.ds(tile * ROWS, ROWS)]

        def read(k: int, tile: Any) -> None:
            plgpu.copy_gmem_to_smem(place(k, tile), tile_ref, barrier)

        def write(k: int, tile: Any) -> None:
            plgpu.copy_smem_to_gmem(tile_ref, place(k, tile))

        # Only what differs from leaf to leaf is in the branches.
        launch.dispatch(program, read)
        plgpu.barrier_wait(barrier)
        value = tile_ref[...]
        value = (value.astype(jnp.float32) * scale_ref[0]).astype(value.dtype)
        if request.unscale:
            tile_ref[...] = value
            plgpu.commit_smem()
            launch.dispatch(program, write)
        found_ref[program] = launches.not_finite_in(value)
        if request.unscale:
            plgpu.wait_smem_to_gmem(0)

    return kernel
