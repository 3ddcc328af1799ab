"""Compiles for an NVIDIA H200 where there is none, to read what XLA makes of a program.

XLA's compiler for GPUs needs the CUDA wheels of JAX (`jax[cuda13]`) but no GPU:
this tells how many kernels a program becomes, what it converts and how much memory it
needs, though not how long it takes. Without a card nothing is tuned: which algorithm
runs a matrix product is a guess of the compiler's.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

# The wheels may be newer than the driver, which there is none of; and a GPU that the
# machine has after all is not to be asked.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


# An instruction: its name, the shapes of its results, what it does, and its operands.
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)", re.M
)
# Those that are a kernel, or a copy, of their own.
KERNELS = frozenset({"fusion", "custom-call", "copy", "copy-start", "reduce"})
NAME = re.compile(r"%([\w.-]+)")
ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")


def _bytes(shapes: str) -> int:
    """Bytes of the arrays of an HLO shape, as of `(f32[2,3]{1,0}, pred[])`."""
    return sum(
        math.prod(map(int, filter(None, dimensions.split(","))))
        * (1 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0]) // 8)
        for dtype, dimensions in ARRAY.findall(shapes)
    )


def _instructions(compiled: jax.stages.Compiled) -> list[tuple[str, str, str, str]]:
    text = compiled.as_text()
    return INSTRUCTION.findall(text[text.index("ENTRY") :])


def kernels(compiled: jax.stages.Compiled) -> int:
    """How many kernels a compiled program launches outside its loops."""
    return sum(kind in KERNELS for _, _, kind, _ in _instructions(compiled))


def bytes_moved(compiled: jax.stages.Compiled) -> int | None:
    """The bytes that the kernels of a program read and write; None if it has loops.

    Operands and results, each once for every kernel that reads or writes it: what the
    memory sees of it if no cache helps.
    """
    instructions = _instructions(compiled)
    if any(kind == "while" for _, _, kind, _ in instructions):
        return None
    size = {name: _bytes(shapes) for name, shapes, _, _ in instructions}
    return sum(
        size[name] + sum(size[read] for read in NAME.findall(operands))
        for name, _, kind, operands in instructions
        if kind in KERNELS
    )


def bytes_reduced(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The bytes that devices add up over all of them, by dtype."""
    instructions = _instructions(compiled)
    shape = {name: shapes for name, shapes, _, _ in instructions}
    found: Counter[str] = Counter()
    for _, _, kind, operands in instructions:
        if kind in ("all-reduce", "all-reduce-start", "reduce-scatter"):
            read = " ".join(shape[name] for name in NAME.findall(operands))
            for dtype, dimensions in ARRAY.findall(read):
                found[dtype] += _bytes(f"{dtype}[{dimensions}]")
    return dict(found)


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    donate: Sequence[int] = (),
    devices: int = 1,
    batch: Sequence[int] = (),
) -> jax.stages.Compiled:
    """Compiles a function of arrays, or of their shapes and dtypes, for H200s.

    Args:
      fn: the function.
      *args: its arguments.
      donate: which of them it may overwrite.
      devices: how many there are, in one machine.
      batch: which arguments are spread over the devices; others are on each.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H200,
        topology=f"1x{devices}x1",
        topology_name="h200",
    )
    mesh = topologies.make_mesh(topology, (devices,), ("gpus",))
    here, spread = (NamedSharding(mesh, PartitionSpec(*a)) for a in ((), ("gpus",)))
    places = tuple(spread if place in batch else here for place in range(len(args)))
    step = jax.jit(fn, in_shardings=places, out_shardings=here, donate_argnums=donate)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = step.trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.compile()
