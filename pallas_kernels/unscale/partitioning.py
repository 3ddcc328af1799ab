"""Runs a kernel on every device's own shards; only the findings cross devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jamp.pallas_kernels.unscale.launches import Findings

# A kernel of (leaves, inv_scale, replicas): the unscaled leaves and its findings, sums
# of squares divided by how many devices hold the same shard.
Kernel = Callable[
    [Sequence[jax.Array], jax.Array, Sequence[int]], tuple[list[jax.Array], Findings]
]


def on_shards(
    kernel: Kernel, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> tuple[list[jax.Array], Findings]:
    """Calls a kernel with the shards of each device and sums the findings.

    Inside a `jax.shard_map` the leaves are shards already, and their findings stay
    those of the device.

    Args:
      kernel: the kernel.
      leaves: arrays of any sharding.
      inv_scale: an argument of the kernel, the same on all devices.
      unscale: whether the kernel returns leaves.

    The axes of the mesh must be of one type; see `why_not`.
    """
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if kinds <= {AxisType.Auto}:
        outputs, findings = _partitioned(kernel, leaves, unscale)(inv_scale, *leaves)
        return list(outputs), findings
    if kinds == {AxisType.Manual}:
        return kernel(leaves, inv_scale, [1] * len(leaves))
    return _mapped(kernel, leaves, inv_scale, unscale)


def why_not() -> list[str]:
    """Why no kernel can run on the shards of this mesh; empty if one can."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    if len(set(kinds)) <= 1:
        return []
    return [f"the mesh has axes of several types ({', '.join(map(str, kinds))})"]


def _partitioned(kernel: Kernel, leaves: Sequence[jax.Array], unscale: bool) -> Any:
    """The kernel, for a partitioner that decides on shardings after tracing."""

    def whole(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
        outputs, findings = kernel(leaves, inv_scale, [1] * len(leaves))
        return tuple(outputs), findings

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        specs = [leaf.sharding.spec for leaf in arguments[1:]]

        def lower(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
            replicas = [_replicas(mesh.shape, spec) for spec in specs]
            outputs, findings = kernel(leaves, inv_scale, replicas)
            return tuple(outputs), _summed(findings, tuple(mesh.shape))

        everywhere = NamedSharding(mesh, PartitionSpec())
        shards = tuple(NamedSharding(mesh, spec) for spec in specs)
        findings = jax.tree.map(lambda _: everywhere, Findings(0, 0))
        outputs = shards if unscale else ()
        return mesh, lower, (outputs, findings), (everywhere, *shards)

    function = custom_partitioning(whole)
    function.def_partition(partition, sharding_rule=_rule(leaves, unscale))
    return function


def _rule(leaves: Sequence[jax.Array], unscale: bool) -> str:
    """The rule that every leaf keeps its sharding: `, a b, c -> a b, c, , `."""
    dimensions = [
        " ".join(f"a{leaf}_{axis}" for axis in range(array.ndim))
        for leaf, array in enumerate(leaves)
    ]
    outputs = dimensions if unscale else []
    return f"{', '.join(['', *dimensions])} -> {', '.join([*outputs, '', ''])}"


def _mapped(
    kernel: Kernel, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> tuple[list[jax.Array], Findings]:
    """The kernel, where the types of the leaves say how they are sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]

    def local(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
        replicas = [_replicas(mesh.shape, spec) for spec in specs]
        outputs, findings = kernel(leaves, inv_scale, replicas)
        return outputs, _summed(findings, mesh.axis_names)

    everywhere = PartitionSpec()
    outputs, findings = jax.shard_map(
        local,
        in_specs=(everywhere, *specs),
        out_specs=(specs if unscale else [], everywhere),
        check_vma=False,
    )(inv_scale, *leaves)
    return outputs, findings


def _summed(findings: Findings, axes: tuple[str, ...]) -> Findings:
    return Findings(*(jax.lax.psum(figure, axes) for figure in findings))


def _replicas(shape: Any, spec: Any) -> int:
    """How many devices of a mesh hold the same shard of an array."""
    names = [name for entry in spec for name in _names(entry)]
    size = math.prod(shape.values())
    return int(size // math.prod(shape[name] for name in names))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
