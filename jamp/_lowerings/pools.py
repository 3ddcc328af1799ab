"""Pools of the largest or the smallest in a window, and their gradients on CPUs.

XLA for CPUs finds what was the largest with arrays of indices, several times as large
as the operand, and writes gradients to these places one by one. Here slices of the
operand, one for each place in the window, are compared as whole vectors; what an
element then adds up is known by where it lies between two windows.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jamp._lowerings.comparisons import widened_by_bits
from jamp._lowerings.own_primitives import like, register, with_rules_of_jax

# Of so many places in a window, or between two, each is a slice in the program.
_MOST_PLACES = 64


class _Windows(NamedTuple):
    """Windows over an array, in each of which one element is chosen."""

    sizes: Sequence[int]
    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    largest: bool  # whether it is the largest one

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The places in a window; of equal elements the first one's is chosen."""
        return [*itertools.product(*map(range, self.sizes))]

    @property
    def before(self) -> list[int]:
        """How many windows before the last that holds an element may hold it too."""
        steps = zip(self.sizes, self.strides, strict=True)
        return [-(-size // stride) - 1 for size, stride in steps]

    def counts(self, shape: Sequence[int]) -> list[int]:
        """How many windows there are over an array, which is padded."""
        found = zip(shape, self.sizes, self.strides, strict=True)
        return [(n - size) // stride + 1 for n, size, stride in found]

    def at(self, array: Any, place: Sequence[int]) -> Any:
        """What stands at a place of each window in an array, which is padded."""
        ends = zip(place, self.counts(array.shape), self.strides, strict=True)
        limits = [start + (count - 1) * stride + 1 for start, count, stride in ends]
        return lax.slice(array, place, limits, self.strides)

    def padded(self, array: Any, filling: float) -> Any:
        return _padded(array, filling, self.padding)

    def chosen(self, operand: Any) -> Any:
        """The number of the place that is chosen in each window."""
        operand = self.padded(
            widened_by_bits(operand), -np.inf if self.largest else np.inf
        )
        stays = lax.ge if self.largest else lax.le
        first, *others = self.places
        best = self.at(operand, first)
        found = jnp.zeros(best.shape, jnp.uint8)
        for number, place in enumerate(others, 1):
            here = self.at(operand, place)
            keeps = stays(best, here)
            best = jnp.where(keeps, best, here)
            found = jnp.where(keeps, found, jnp.uint8(number))
        # Each reader would compare anew.
        return lax.optimization_barrier(found)


def _windows(params: dict[str, Any]) -> _Windows:
    names = "window_dimensions", "window_strides", "padding"
    sizes, strides, padding = map(params.__getitem__, names)
    return _Windows(sizes, strides, padding, params["select_prim"] is lax.ge_p)


def _gather(tangents: Any, operand: Any, **params: Any) -> Any:
    """Of each window the tangent of the element that is chosen."""
    windows = _windows(params)
    found, tangents = windows.chosen(operand), windows.padded(tangents, 0)
    total: Any = 0
    for number, place in enumerate(windows.places):
        total = jnp.where(found == number, windows.at(tangents, place), total)
    return total


def _scatter_add(source: Any, operand: Any, **params: Any) -> Any:
    """Adds what windows have to the elements that are chosen in them."""
    windows = _windows(params)
    margins = [(count, count) for count in windows.before]
    found = _padded(windows.chosen(operand), len(windows.places), margins)
    some = partial(_added, windows, found, _padded(source, 0, margins))
    result = _interleaved(some, windows.strides)
    ends = zip(windows.padding, operand.shape, result.shape, strict=True)
    return _padded(result, 0, [(-low, low + size - n) for (low, _), size, n in ends])


def _added(windows: _Windows, found: Any, source: Any, *offset: int) -> Any:
    """What the elements at an offset from the first one of a window add up.

    Args:
      windows: the windows.
      found: the number of the place that is chosen in each, with a margin.
      source: what they have to add, with the same margin.
      offset: less than the strides.
    """
    sizes = [n - m for n, m in zip(source.shape, windows.before, strict=True)]
    total: Any = None
    for number, place in enumerate(windows.places):
        if tuple(map(operator.mod, place, windows.strides)) != offset:
            continue
        back = map(operator.floordiv, place, windows.strides)
        starts = list(map(operator.sub, windows.before, back))
        limits = list(map(operator.add, starts, sizes))
        chosen = lax.slice(found, starts, limits) == number
        term = jnp.where(chosen, lax.slice(source, starts, limits), 0)
        total = term if total is None else total + term
    return jnp.zeros(sizes, source.dtype) if total is None else total


def _padded(array: Any, filling: float, margins: Sequence[tuple[int, int]]) -> Any:
    value = np.asarray(filling, array.dtype)
    return lax.pad(array, value, [(low, high, 0) for low, high in margins])


def _interleaved(part: Callable[..., Any], strides: Sequence[int]) -> Any:
    """An array of which `part` gives the elements at an offset, every so many."""
    if not strides:
        return part()
    first, *others = strides
    parts = [_interleaved(partial(part, at), others) for at in range(first)]
    if first == 1:
        return parts[0]
    axis = parts[0].ndim - len(strides)
    shape = [*parts[0].shape]
    shape[axis] *= first
    return jnp.stack(parts, axis + 1).reshape(shape)


def _define(of_jax: Primitive, gradient: Callable[..., Any] | None = None) -> Primitive:
    """A primitive like one of JAX's; a gradient is computed otherwise on one CPU."""

    def on_one_cpu(*arrays: Any, **params: Any) -> Any:
        made, _ = of_jax.abstract_eval(*map(jax.typeof, arrays), **params)
        if gradient and all(_is_small(a.shape, params) for a in (*arrays, made)):
            return gradient(*arrays, **params)
        return of_jax.bind(*arrays, **params)

    primitive = like(of_jax)
    register(primitive, of_jax.bind, run_on_one_cpu=on_one_cpu)
    return primitive


def _is_small(shape: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether windows lie close together, and hold few elements next to each other.

    Of a dimension over which they move, an exported program may not know the size, and
    there may be none of them.
    """
    sizes, strides = params["window_dimensions"], params["window_strides"]
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    most = max(math.prod(sizes), math.prod(strides))
    moves = zip(shape, sizes, strides, strict=True)
    known = all(isinstance(n, int) and n for n, *steps in moves if steps != [1, 1])
    return known and most <= _MOST_PLACES and set(dilations) <= {1}


OWN = {
    lax.reduce_window_max_p: _define(lax.reduce_window_max_p),
    lax.reduce_window_min_p: _define(lax.reduce_window_min_p),
    lax.select_and_gather_add_p: _define(lax.select_and_gather_add_p, _gather),
    lax.select_and_scatter_add_p: _define(lax.select_and_scatter_add_p, _scatter_add),
}
with_rules_of_jax(OWN)
