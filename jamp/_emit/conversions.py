"""Conversions of arrays to the dtypes that a plan gives them."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
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


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def widened_for(saves: bool, low: Any, wide: Any) -> Any:
    """The cast of an array, whose gradient goes to `wide`, a cast made elsewhere."""
    del saves
    return jax.lax.convert_element_type(low, wide.dtype)


@widened_for.defjvp
def _widened_for_jvp(saves: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    # Without `wide`, which would be saved; second derivatives go to the array.
    low, _ = primals
    found = widened_bits(low) if saves else jax.lax.convert_element_type(low, FLOAT32)
    return found, tangents[1]


def widened_bits(low: Any) -> Any:
    """The float32 of the 16 bits themselves.

    From a cast alone XLA may spare the rounding before it, in the forward pass; what is
    saved there would not fit what the backward pass computes from the 16 bits.
    """
    wide = jax.lax.convert_element_type(low, FLOAT32)
    return jax.lax.reduce_precision(wide, 8, jax.numpy.finfo(low.dtype).nmant)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_rounded_gradient(dtype: Any, array: Any) -> Any:
    """The array itself; XLA has to round its gradient to this dtype of 16 bits.

    Otherwise it keeps the float32 that the gradient is rounded from for who sums it, as
    the gradient of a bias does, and writes and reads it beside the 16 bits.
    """
    del dtype
    return array


@with_rounded_gradient.defjvp
def _rounded_gradient_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    low = jax.lax.convert_element_type(tangents[0], dtype)
    low = jax.lax.optimization_barrier(low)
    return primals[0], jax.lax.convert_element_type(low, primals[0].dtype)
