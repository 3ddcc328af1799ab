"""Runs a kernel on every device's own shards; only what it found crosses devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jamp.pallas_kernels.unscale.launches import Results

# A kernel of (leaves, inv_scale).
Kernel = Callable[[Sequence[jax.Array], jax.Array], Results]


def on_shards(
    kernel: Kernel, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> Results:
    """Calls a kernel with the shards of each device and sums what it found.

    Inside a `jax.shard_map` the leaves are shards already, and what was found stays
    with the device.

    Args:
      kernel: the kernel.
      leaves: arrays of any sharding.
      inv_scale: an argument of the kernel, the same on all devices.
      unscale: whether the kernel returns leaves.

    The axes of the mesh must be of one type; see `why_not`.
    """
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if kinds <= {AxisType.Auto}:
        outputs, not_finite = _partitioned(kernel, leaves, unscale)(inv_scale, *leaves)
        return list(outputs), not_finite
    if kinds == {AxisType.Manual}:
        return kernel(leaves, inv_scale)
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
        outputs, not_finite = kernel(leaves, inv_scale)
        return tuple(outputs), not_finite

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        specs = [leaf.sharding.spec for leaf in arguments[1:]]

        def lower(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
            outputs, not_finite = kernel(leaves, inv_scale)
            return tuple(outputs), jax.lax.psum(not_finite, tuple(mesh.shape))

        everywhere = NamedSharding(mesh, PartitionSpec())
        shards = tuple(NamedSharding(mesh, spec) for spec in specs)
        outputs = shards if unscale else ()
        return mesh, lower, (outputs, everywhere), (everywhere, *shards)

    function = custom_partitioning(whole)
    function.def_partition(partition, sharding_rule=_rule(leaves, unscale))
    return function


def _rule(leaves: Sequence[jax.Array], unscale: bool) -> str:
    """The rule that every leaf keeps its sharding: `, a b, c -> a b, c, `."""
    dimensions = [
        " ".join(f"a{leaf}_{axis}" for axis in range(array.ndim))
        for leaf, array in enumerate(leaves)
    ]
    outputs = dimensions if unscale else []
    return f"{', '.join(['', *dimensions])} -> {', '.join([*outputs, ''])}"


def _mapped(
    kernel: Kernel, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> Results:
    """The kernel, where the types of the leaves say how they are sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]

    def local(inv_scale: jax.Array, *leaves: jax.Array) -> Results:
        outputs, not_finite = kernel(leaves, inv_scale)
        return outputs, jax.lax.psum(not_finite, mesh.axis_names)

    everywhere = PartitionSpec()
    outputs, not_finite = jax.shard_map(
        local,
        in_specs=(everywhere, *specs),
        out_specs=(specs if unscale else [], everywhere),
        check_vma=False,
    )(inv_scale, *leaves)
    return outputs, not_finite
