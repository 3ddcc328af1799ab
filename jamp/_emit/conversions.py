"""Conversions of arrays to the dtypes that a plan gives them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import get_abstract_mesh, use_abstract_mesh


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
