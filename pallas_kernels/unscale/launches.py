"""What every backend is asked and answers, and how launches divide leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_DTYPES = [jnp.dtype(dtype) for dtype in ("float32", "float16", "bfloat16")]
# Offsets inside a leaf are int32.
_LARGEST_LEAF = 2**31 - 2**16


@dataclass(frozen=True)
class Request:
    """What a kernel is to do, besides the check that each does.

    Attributes:
      unscale: whether to write the leaves unscaled.
      squares: whether to sum the squares of what it read, or wrote.
      interpret: whether to run in interpret mode, on any device.
    """

    unscale: bool = True
    squares: bool = False
    interpret: bool = False


class Findings(NamedTuple):
    """What a backend found out about leaves, after unscaling if that was requested.

    Attributes:
      not_finite: above zero if one of them holds an inf or a NaN, float32[].
      squares: the sum of squares of all numbers, or 0 where it was not requested, in at
        least float32, [].
    """

    not_finite: Any
    squares: Any


@dataclass(frozen=True)
class Launch:
    """One launch: some leaves, cut into tiles of equal size, one program for each.

    Attributes:
      leaves: positions in the list of leaves.
      sizes: the number of elements of each.
      share: what their squares count: one over the number of devices that hold the same
        shards and find the same.
      tile: the number of elements of a tile.
    """

    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    share: float
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

    def note(
        self, request: Request, value: Any, sums: Sequence[Any], program: Any
    ) -> None:
        """Writes what a program found in its tile to the sums of a kernel."""
        value = value.astype(jnp.float32)
        # False for a NaN too.
        finite = jnp.abs(value) < jnp.inf
        sums[0][program] = jnp.max(jnp.where(finite, 0.0, 1.0))
        if request.squares:
            sums[1][program] = jnp.sum(value * value) * self.share


def plan(
    leaves: Sequence[Any], replicas: Sequence[int], tile: int, most: int
) -> list[Launch]:
    """Divides leaves among launches of at most `most` leaves.

    The leaves of a launch have one dtype, and the same number of replicas.
    """
    launches = []
    kinds = [(leaf.dtype, count) for leaf, count in zip(leaves, replicas, strict=True)]
    for kind in dict.fromkeys(kinds):
        alike = [k for k in range(len(leaves)) if kinds[k] == kind]
        for first in range(0, len(alike), most):
            group = tuple(alike[first : first + most])
            sizes = tuple(leaves[k].size for k in group)
            launches.append(Launch(group, sizes, 1 / kind[1], tile))
    return launches


def run_all(
    launches: Sequence[Launch],
    leaves: Sequence[jax.Array],
    call: Callable[[Launch, list[jax.Array]], tuple[Any, Any]],
) -> tuple[list[jax.Array], Findings]:
    """Runs launches and puts together what they return.

    Args:
      launches: a plan for the leaves.
      leaves: the leaves.
      call: runs a launch on its leaves. Returns them unscaled (none if that was not
        requested), and for each program 1.0 where it met a number that is not finite,
        and its sum of squares (if that was requested).
    """
    outputs: dict[int, jax.Array] = {}
    flags, squares = [], [jnp.zeros(1, jnp.float32)]
    for launch in launches:
        unscaled, (found, *sums) = call(launch, [leaves[k] for k in launch.leaves])
        flags.append(found)
        squares += sums
        # Nothing unscaled, no outputs.
        for k, array in zip(launch.leaves, unscaled, strict=False):
            outputs[k] = array.reshape(leaves[k].shape)
    findings = Findings(jnp.concatenate(flags).max(), jnp.concatenate(squares).sum())
    return [outputs[k] for k in sorted(outputs)], findings


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
