"""The kernel in Pallas for Triton, for NVIDIA GPUs from Ampere on."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jamp.pallas_kernels.unscale import launches
from jamp.pallas_kernels.unscale.launches import Launch, Request, Results

MINIMUM_CAPABILITY = 8.0

# Elements of a tile and warps of its program: 16 elements a thread, so that several
# loads of 16 bytes are under way at once.
TILE, WARPS = 4096, 8
# Each leaf of a launch has two branches of its own in the kernel.
MOST_LEAVES = 64
takes = launches.fits


def run(leaves: Sequence[jax.Array], inv_scale: jax.Array, request: Request) -> Results:
    def call(launch: Launch, leaves: list[jax.Array]) -> Any:
        def shape(size: int, dtype: Any, *varied_by: jax.Array) -> Any:
            kind = launches.varying(inv_scale, *varied_by)
            return jax.ShapeDtypeStruct((size,), dtype, manual_axis_type=kind)

        programs = launch.starts[-1]
        flat = [leaf.reshape(-1) for leaf in leaves]
        written = flat if request.unscale else []
        *unscaled, found = pl.pallas_call(
            _kernel(launch, request),
            grid=(programs,),
            out_shape=[
                *(shape(leaf.size, leaf.dtype, leaf) for leaf in written),
                shape(programs, jnp.float32, *leaves),
            ],
            input_output_aliases={k + 1: k for k in range(len(written))},
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=request.interpret,
            name="unscale_and_check" if request.unscale else "all_finite",
        )(inv_scale.reshape(1), *flat)
        return unscaled, found

    return launches.run_launches(leaves, TILE, MOST_LEAVES, call)


def _kernel(launch: Launch, request: Request) -> Any:
    count = len(launch.sizes)

    def kernel(scale_ref: Any, *refs: Any) -> None:
        inputs, (*outputs, found_ref) = refs[:count], refs[count:]
        program = pl.program_id(0)

        def place(k: int, tile: Any) -> tuple[Any, Any]:
            index = tile * launch.tile + jnp.arange(launch.tile)
            return index, index < launch.sizes[k]

        def read(k: int, tile: Any) -> Any:
            index, inside = place(k, tile)
            return plgpu.load(inputs[k].at[index], mask=inside, other=0)

        # Only what differs from leaf to leaf is in the branches.
        value = launch.dispatch(program, read)
        value = (value.astype(jnp.float32) * scale_ref[0]).astype(value.dtype)
        if request.unscale:

            def write(k: int, tile: Any) -> None:
                index, inside = place(k, tile)
                plgpu.store(outputs[k].at[index], value, mask=inside)

            launch.dispatch(program, write)
        found_ref[program] = launches.not_finite_in(value)

    return kernel
