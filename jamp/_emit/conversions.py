"""Conversions of arrays to the dtypes that a plan gives them.

And arrays whose gradients go to others, as those of a cast that is made elsewhere do.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from jamp._dtypes import FLOAT32


def convert(array: Any, dtype: Any) -> Any:
    """An array in a dtype, on the mesh that it lives on."""
    if jax.typeof(array).dtype == dtype:
        return array
    mesh, current = jax.typeof(array).sharding.mesh, get_abstract_mesh()
    # An equation may lead from one mesh to another.
    leads = not (mesh.empty or current.empty or mesh == current)
    with use_abstract_mesh(mesh) if leads else nullcontext():
        return jax.lax.convert_element_type(array, dtype)


def convert_all(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [
        array if dtype is None else convert(array, dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def widened_for(saves: bool, low: Any, wide: Any) -> Any:
    """The cast of an array, whose gradient goes to `wide`, a cast made elsewhere."""
    return _widening(saves)(low, wide)


@cache
def _widening(saves: bool) -> Any:
    """One function, and one rule, for all calls: equal programs have the same."""

    @jax.custom_jvp
    def widened(low: Any, wide: Any) -> Any:
        return jax.lax.convert_element_type(low, wide.dtype)

    @widened.defjvp
    def widened_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # Without `wide`, which would be saved; second derivatives go to the array.
        low, _ = primals
        cast = widened_bits if saves else partial(convert, dtype=FLOAT32)
        return cast(low), tangents[1]

    return widened


def narrowed(wide: Any, narrow: Any) -> Any:
    """A cast made elsewhere, of which every use has a gradient of its own in float32.

    Outside a loop a cast is one value, and JAX would sum its gradients over all
    iterations in its own dtype. Seen from here each use is a cast of `wide`.
    """
    return _narrowed(wide, narrow)


def perturbed(array: Any, by: Any) -> Any:
    """An array as it is, which is perturbed as another is, too."""
    return _perturbed(array, by)


def _one_of(place: int, tangent: Callable[[Any, Any], Any]) -> Any:
    """A function that gives one of its operands, with a tangent of those of both."""

    @jax.custom_jvp
    def one_of(one: Any, other: Any) -> Any:
        return (one, other)[place]

    @one_of.defjvp
    def one_of_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # Through itself again, so that it has second derivatives.
        return one_of(*primals), tangent(*tangents)

    return one_of


_narrowed = _one_of(1, lambda of_wide, own: convert(of_wide, own.dtype))
_perturbed = _one_of(0, lambda own, by: own + convert(by, own.dtype))


def widened_bits(low: Any) -> Any:
    """The float32 of the 16 bits themselves.

    From a cast alone XLA may spare the rounding before it, in the forward pass; what is
    saved there would not fit what the backward pass computes from the 16 bits.
    """
    wide = jax.lax.convert_element_type(low, FLOAT32)
    return jax.lax.reduce_precision(wide, 8, jax.numpy.finfo(low.dtype).nmant)


def with_rounded_gradient(dtype: Any, array: Any) -> Any:
    """The array itself; XLA has to round its gradient to this dtype of 16 bits.

    Otherwise it keeps the float32 that the gradient is rounded from for who sums it, as
    the gradient of a bias does, and writes and reads it beside the 16 bits.
    """
    return _rounding_gradient(dtype)(array)


@cache
def _rounding_gradient(dtype: Any) -> Any:
    """One function, and one rule, for all calls."""

    @jax.custom_jvp
    def with_rounded_gradient(array: Any) -> Any:
        return array

    @with_rounded_gradient.defjvp
    def rounded_gradient_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        low = jax.lax.convert_element_type(tangents[0], dtype)
        low = jax.lax.optimization_barrier(low)
        return primals[0], jax.lax.convert_element_type(low, primals[0].dtype)

    return with_rounded_gradient
