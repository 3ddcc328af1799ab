"""What XLA makes of the unscaling programs when it compiles them for an H200."""

import time
from collections.abc import Callable
from typing import Any

# First, since it sets what JAX reads when it is imported.
from deviceless import compile_for_h200, kernels  # isort: skip
import gradient_trees
import jax
import jax.numpy as jnp
from rich.progress import track

from jamp.pallas_kernels.unscale import backends, reference, with_kernel
from jamp.pallas_kernels.unscale.launches import Request

REQUEST = Request()


def programs(
    trees: dict[str, Callable[[], gradient_trees.Tree]],
) -> list[dict[str, Any]]:
    """For every tree and implementation: kernels, bytes in place, compilation time."""
    rows = []
    for name, implementation in track(
        [(n, i) for n in trees for i in ("xla", "triton", "mosaic_gpu")], "compiling"
    ):
        tree = trees[name]()
        leaves = list(tree.values())
        start = time.perf_counter()
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        program = _program(implementation)
        compiled = compile_for_h200(program, leaves, scale, donate=(0,))
        seconds = time.perf_counter() - start
        rows.append(
            {
                "tree": name,
                "leaves": len(leaves),
                "bytes": gradient_trees.bytes_of(tree),
                "program": implementation,
                "kernels": kernels(compiled),
                "bytes_in_place": compiled.memory_analysis().alias_size_in_bytes,
                "compile_seconds": seconds,
            }
        )
    return rows


def _program(implementation: str) -> Callable[..., Any]:
    """As `unscale_and_check` runs it, which would ask for a GPU."""
    if implementation == "xla":
        return lambda leaves, scale: reference.run(leaves, scale, REQUEST)
    kernel = backends.load(implementation)
    return lambda leaves, scale: with_kernel(kernel, leaves, scale, REQUEST)
