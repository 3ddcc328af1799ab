"""Runs a kernel on every device's own shards; only what it found crosses devices."""

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
    with the device. The axes of the mesh must be of one type; see `why_not`.

    Args:
      kernel: the kernel.
      leaves: arrays of any sharding.
      inv_scale: an argument of the kernel, the same on all devices.
      unscale: whether the kernel returns leaves.
    """
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if kinds == {AxisType.Manual}:
        return kernel(leaves, inv_scale)
    wrap = _partitioned if kinds <= {AxisType.Auto} else _mapped
    outputs, not_finite = wrap(kernel, leaves, unscale)(inv_scale, *leaves)
    return list(outputs), not_finite


def why_not() -> list[str]:
    """Why no kernel can run on the shards of this mesh; empty if one can."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    if len(set(kinds)) <= 1:
        return []
    return [f"the mesh has axes of several types ({', '.join(map(str, kinds))})"]


def _summed(kernel: Kernel, axes: tuple[str, ...] | None) -> Any:
    """The kernel, with what it found summed over axes of a mesh, if there are any."""

    def run(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
        outputs, not_finite = kernel(leaves, inv_scale)
        if axes is not None:
            not_finite = jax.lax.psum(not_finite, axes)
        return tuple(outputs), not_finite

    return run


def _partitioned(kernel: Kernel, leaves: Sequence[jax.Array], unscale: bool) -> Any:
    """The kernel, for a partitioner that decides on shardings after tracing."""

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        everywhere = NamedSharding(mesh, PartitionSpec())
        shards = tuple(NamedSharding(mesh, x.sharding.spec) for x in arguments[1:])
        lowered = _summed(kernel, tuple(mesh.shape))
        outputs = shards if unscale else ()
        return mesh, lowered, (outputs, everywhere), (everywhere, *shards)

    function = custom_partitioning(_summed(kernel, None))
    # Every leaf keeps its sharding: `, a b, c -> a b, c, `.
    names = [
        " ".join(f"a{leaf}_{axis}" for axis in range(array.ndim))
        for leaf, array in enumerate(leaves)
    ]
    outputs = names if unscale else []
    rule = f"{', '.join(['', *names])} -> {', '.join([*outputs, ''])}"
    function.def_partition(partition, sharding_rule=rule)
    return function


def _mapped(kernel: Kernel, leaves: Sequence[jax.Array], unscale: bool) -> Any:
    """The kernel, where the types of the leaves say how they are sharded."""
    everywhere = PartitionSpec()
    specs = tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)
    return jax.shard_map(
        _summed(kernel, jax.sharding.get_abstract_mesh().axis_names),
        in_specs=(everywhere, *specs),
        out_specs=(specs if unscale else (), everywhere),
        check_vma=False,
    )
