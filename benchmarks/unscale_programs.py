"""What XLA makes of the unscaling programs when it compiles them for an H200."""

import re
import time
from collections.abc import Callable
from typing import Any

# First, since it sets what JAX reads when it is imported.
from deviceless import compile_for_h200  # isort: skip
import jax
import jax.numpy as jnp
from rich.progress import track

from jamp.pallas_kernels.unscale import backends, reference, shapes, with_kernel
from jamp.pallas_kernels.unscale.launches import Request

REQUEST = Request()
# Instructions of the entry computation that are a kernel, or a copy, of their own.
KERNELS = re.compile(r"= [^=]*? (?:fusion|custom-call|copy|copy-start|reduce)\(")


def programs(trees: dict[str, Callable[[], shapes.Tree]]) -> list[dict[str, Any]]:
    """For every tree and implementation: kernels, bytes in place, compilation time."""
    rows = []
    for name, implementation in track(
        [(n, i) for n in trees for i in ("xla", "triton", "mosaic_gpu")], "compiling"
    ):
        leaves = list(trees[name]().values())
        start = time.perf_counter()
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        program = _program(implementation)
        compiled = compile_for_h200(program, leaves, scale, donate=(0,))
        seconds = time.perf_counter() - start
        text = compiled.as_text()
        rows.append(
            {
                "tree": name,
                "leaves": len(leaves),
                "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
                "program": implementation,
                "kernels": len(KERNELS.findall(text[text.index("ENTRY") :])),
                "bytes_in_place": compiled.memory_analysis().alias_size_in_bytes,
                "compile_seconds": seconds,
            }
        )
    return rows


def _program(implementation: str) -> Callable[..., Any]:
    """As `unscale_and_check` runs it, which would ask for a GPU."""

    def program(leaves: list[jax.Array], inv_scale: jax.Array) -> Any:
        kernel = None if implementation == "xla" else backends.load(implementation)
        taken = [kernel is not None and kernel.takes(leaf) for leaf in leaves]
        ours = [leaf for leaf, take in zip(leaves, taken, strict=True) if take]
        others = [leaf for leaf, take in zip(leaves, taken, strict=True) if not take]
        results = reference.run(others, inv_scale, REQUEST)
        if kernel is None:
            return results
        return results, with_kernel(kernel, ours, inv_scale, REQUEST)

    return program
