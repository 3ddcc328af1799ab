"""What every backend is asked and answers, and how launches divide leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

_DTYPES = [jnp.dtype(dtype) for dtype in ("float32", "float16", "bfloat16")]
# What a backend answers: the leaves unscaled, none if that was not requested, and a
# float32[] above zero if one of them then holds an inf or a NaN.
Results = tuple[list[jax.Array], jax.Array]
# Offsets inside a leaf are int32.
_LARGEST_LEAF = 2**31 - 2**16


@dataclass(frozen=True)
class Request:
    """What a kernel is to do, besides the check that each does.

    Attributes:
      unscale: whether to write the leaves unscaled.
      interpret: whether to run in interpret mode, on any device.
    """

    unscale: bool = True
    interpret: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch: some leaves, cut into tiles of equal size, one program for each.

    Attributes:
      leaves: positions in the list of leaves.
      sizes: the number of elements of each.
      tile: the number of elements of a tile.
    """

    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    tile: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first program of each leaf, and the number of programs."""
        return (0, *accumulate(-(-size // self.tile) for size in self.sizes))

    @property
    def programs(self) -> int:
        """The number of programs."""
        return self.starts[-1]

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

        return search(0, len(self.leaves))


def not_finite_in(value: Any) -> jax.Array:
    """1.0 if a tile holds an inf or a NaN, else 0.0, inside a kernel."""
    # The comparison is False for a NaN too.
    finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
    return jnp.max(jnp.where(finite, 0.0, 1.0))


def plan(leaves: Sequence[Any], tile: int, most: int) -> list[Launch]:
    """Divides leaves among launches of at most `most` leaves of one dtype."""
    launches = []
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        alike = [k for k, leaf in enumerate(leaves) if leaf.dtype == dtype]
        for first in range(0, len(alike), most):
            group = tuple(alike[first : first + most])
            launches.append(Launch(group, tuple(leaves[k].size for k in group), tile))
    return launches


def run_all(
    launches: Sequence[Launch],
    leaves: Sequence[jax.Array],
    call: Callable[[Launch, list[jax.Array]], Results],
) -> Results:
    """Runs launches and puts together what they return.

    Args:
      launches: a plan for the leaves.
      leaves: the leaves.
      call: runs a launch on its leaves. Returns them unscaled (none if that was not
        requested), and what `not_finite_in` found for each program.
    """
    outputs: dict[int, jax.Array] = {}
    flags = []
    for launch in launches:
        unscaled, found = call(launch, [leaves[k] for k in launch.leaves])
        flags.append(found)
        # Where nothing was to be unscaled, there are no arrays.
        for k, array in zip(launch.leaves, unscaled, strict=False):
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
