"""What backends are asked and answer; how launches and devices divide leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_DTYPES = [jnp.dtype(dtype) for dtype in ("float32", "float16", "bfloat16")]
# What a backend answers: the leaves unscaled, none if that was not requested, and a
# float32[] above zero if one of them, unscaled, holds an inf or a NaN.
Results = tuple[list[jax.Array], jax.Array]
# Offsets inside a leaf are int32.
_LARGEST_LEAF = 2**31 - 2**16


@dataclass(frozen=True)
class Request:
    unscale: bool = True  # whether to write the leaves unscaled, not only check them
    interpret: bool = False  # whether to run in interpret mode, on any device


@dataclass(frozen=True)
class Launch:
    """Some leaves, cut into tiles of equal size, one program for each."""

    sizes: tuple[int, ...]  # numbers of elements of the leaves
    tile: int  # that of a tile

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first program of each leaf, and the number of programs."""
        return (0, *accumulate(-(-size // self.tile) for size in self.sizes))

    def dispatch(self, program: Any, work: Callable[[int, Any], Any]) -> Any:
        """Returns `work(k, tile)` for the leaf and the tile of a program of a kernel.

        A program finds its leaf, the k-th of the launch, by bisection: a chain of
        comparisons would be as long as the list of leaves.
        """

        def search(low: int, high: int) -> Any:
            if high - low == 1:
                return work(low, program - self.starts[low])
            middle = (low + high) // 2
            return jax.lax.cond(
                program < self.starts[middle],
                lambda: search(low, middle),
                lambda: search(middle, high),
            )

        return search(0, len(self.sizes))


def not_finite_in(value: Any) -> jax.Array:
    """1.0 if a tile holds an inf or a NaN, else 0.0, inside a kernel."""
    # The comparison is False for a NaN too.
    return jnp.max(jnp.where(jnp.abs(value.astype(jnp.float32)) < jnp.inf, 0.0, 1.0))


def run_launches(
    leaves: Sequence[jax.Array],
    tile: int,
    most: int,
    call: Callable[[Launch, list[jax.Array]], Results],
) -> Results:
    """Runs launches of at most `most` leaves of one dtype on all leaves.

    `call` runs a launch on its leaves. It returns them unscaled (none if that was not
    requested), and what `not_finite_in` found for each program.
    """
    outputs: dict[int, jax.Array] = {}
    flags = []
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        alike = [k for k, leaf in enumerate(leaves) if leaf.dtype == dtype]
        for first in range(0, len(alike), most):
            positions = alike[first : first + most]
            group = [leaves[k] for k in positions]
            launch = Launch(tuple(leaf.size for leaf in group), tile)
            unscaled, found = call(launch, group)
            flags.append(found)
            # Where nothing was to be unscaled, there are no arrays.
            for k, array in zip(positions, unscaled, strict=False):
                outputs[k] = array.reshape(leaves[k].shape)
    return [outputs[k] for k in sorted(outputs)], jnp.concatenate(flags).max()


def fits(leaf: Any, multiple: int = 1) -> bool:
    """Whether a kernel for multiples of so many elements can take a leaf."""
    return (
        leaf.dtype in _DTYPES
        and 0 < leaf.size <= _LARGEST_LEAF
        and leaf.size % multiple == 0
    )


def varying(*arrays: Any) -> jax.sharding.ManualAxisType:
    """The type, inside a shard_map, of what is computed from arrays."""
    axes = (jax.typeof(array).manual_axis_type.varying for array in arrays)
    return jax.sharding.ManualAxisType(varying=frozenset[Any]().union(*axes))


# A kernel of (leaves, inv_scale).
Kernel = Callable[[Sequence[jax.Array], jax.Array], Results]


def on_shards(
    kernel: Kernel, leaves: Sequence[jax.Array], inv_scale: jax.Array, unscale: bool
) -> Results:
    """Calls a kernel with the shards of each device and sums what it found.

    Inside a `jax.shard_map` the leaves are shards already, and what was found stays
    with the device. The axes of the mesh must be of one type. `unscale` is whether the
    kernel returns leaves.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
        return kernel(leaves, inv_scale)
    if kinds <= {AxisType.Auto}:
        run = _partitioned(kernel, leaves, unscale)
    else:
        # The types of the leaves say how they are sharded.
        specs = tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)
        run = jax.shard_map(
            _summed(kernel, mesh.axis_names),
            in_specs=(PartitionSpec(), *specs),
            out_specs=(specs if unscale else (), PartitionSpec()),
            check_vma=False,
        )
    outputs, not_finite = run(inv_scale, *leaves)
    return list(outputs), not_finite


def _summed(kernel: Kernel, axes: tuple[str, ...] = ()) -> Any:
    def run(inv_scale: jax.Array, *leaves: jax.Array) -> Any:
        outputs, not_finite = kernel(leaves, inv_scale)
        return tuple(outputs), jax.lax.psum(not_finite, axes)

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

    function = custom_partitioning(_summed(kernel))
    # Every leaf keeps its sharding: `, a b, c -> a b, c, `.
    names = [
        " ".join(f"a{leaf}_{axis}" for axis in range(array.ndim))
        for leaf, array in enumerate(leaves)
    ]
    outputs = names if unscale else []
    rule = f"{', '.join(['', *names])} -> {', '.join([*outputs, ''])}"
    function.def_partition(partition, sharding_rule=rule)
    return function
