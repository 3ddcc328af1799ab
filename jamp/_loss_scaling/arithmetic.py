"""What loss scaling computes: products with scales, flags over devices, choices.

Here is also what stands around it: an autocast has no effect inside, what is scaled
meanwhile is noted, and axes that are not mapped are named.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jamp._compat import api_boundary
from jamp._equations.binding import looks_for_nans
from jamp._errors import ScalerError
from jamp._loss_scaling.arguments import (
    LARGEST,
    SMALLEST_NORMAL,
    expect,
    is_number,
)
from jamp._tracing import regions
from jamp.pallas_kernels.unscale.reference import unscaled

_P = ParamSpec("_P")
_R = TypeVar("_R")

_noted: ContextVar[list[Any] | None] = ContextVar("noted", default=None)


def outside_of_autocast(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of loss scaling, which an autocast around it leaves as it is."""
    return api_boundary(regions.as_written("loss scaling, as it is written")(fn))


def scaled(scale: jax.Array, outputs: Any) -> Any:
    """Every leaf times a scale; see `GradScaler.scale`."""

    def scaled_leaf(leaf: Any) -> jax.Array:
        expect(is_number(leaf), leaf, "outputs must be arrays or numbers,")
        array = jnp.asarray(_in_float32(leaf) if isinstance(leaf, int) else leaf)
        inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        # Not promoted: float8 has no implicit promotion.
        wide = array.dtype if inexact and array.dtype.itemsize >= 4 else jnp.float32
        keeps = inexact and array.ndim > 0
        times_scale = array.astype(wide) * jnp.asarray(scale, wide)
        return times_scale.astype(array.dtype if keeps else wide)

    found = jax.tree.map(scaled_leaf, outputs)
    noted = _noted.get()
    if noted is not None:
        noted.extend(jax.tree.leaves(found))
    return found


def _in_float32(number: int) -> np.float32:
    """A number that JAX would hold in an int32, into which it may not fit."""
    try:
        return np.float32(number)
    except OverflowError as error:
        raise ScalerError("an int to scale is too large for a float") from error


def noting_scaled(
    fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> tuple[_R, list[Any]]:
    """What a function returns, and the arrays that were scaled meanwhile."""
    noted: list[Any] = []
    token = _noted.set(noted)
    try:
        return fn(*args, **kwargs), noted
    finally:
        _noted.reset(token)


def times(tree: Any, factor: jax.Array) -> Any:
    """A tree whose floating arrays are multiplied, in their own dtypes."""

    def multiplied(leaf: Any) -> Any:
        if not jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact):
            return leaf
        return unscaled([leaf], factor)[0]

    return jax.tree.map(multiplied, tree)


def product(scale: jax.Array, factor: float) -> jax.Array:
    """`f32(f64(scale) * factor)`, which is torch's."""
    exact = abs(math.frexp(factor)[0]) == 0.5
    if exact and SMALLEST_NORMAL <= abs(factor) <= LARGEST:
        return jnp.multiply(scale, jnp.float32(factor))
    with jax.enable_x64(True):
        wide = jnp.asarray(scale, jnp.float64) * np.float64(factor)
        return jnp.asarray(wide, jnp.float32)


def on_any_shard(flag: jax.Array, axis_name: Any) -> jax.Array:
    """Whether a flag is set anywhere along mapped axes."""
    with over_axes(axis_name):
        return jnp.asarray(jax.lax.psum(flag.astype(jnp.int32), axis_name) > 0)


@contextmanager
def over_axes(axis_name: Any) -> Iterator[None]:
    """Says of axes that are reduced over what they have to be, if they are not."""
    try:
        yield
    except NameError as error:
        raise ScalerError(
            f"axis_name={axis_name!r} names no axis that is mapped here: it is one of "
            "jax.shard_map, jax.pmap or jax.vmap around the step; arrays that are "
            "sharded under jax.jit need none"
        ) from error


def select(which: jax.Array, first: Any, second: Any) -> Any:
    """The first tree where a flag is set, else the second, element by element."""
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), first, second)


def as_if_finite(found: jax.Array, grads: Any) -> Any:
    """Gradients for an optimizer whose step is thrown away if a flag is set.

    Where JAX looks for NaN, it would raise before that: there, ones take their place,
    as an optimizer may divide by zeros. Elsewhere it need not wait for the flag.
    """
    if not looks_for_nans():
        return grads
    return select(found, jax.tree.map(jnp.ones_like, grads), grads)
