"""Conversions of arrays, on the mesh that they live on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import get_abstract_mesh, use_abstract_mesh


def convert(array: Any, dtype: Any) -> Any:
    """An array in a dtype, on the mesh that it lives on."""
    if jax.typeof(array).dtype == dtype:
        return array
    with _mesh_of(array):
        return jax.lax.convert_element_type(array, dtype)


def convert_all(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [
        array if dtype is None else convert(array, dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def _mesh_of(array: Any) -> AbstractContextManager[Any]:
    """The mesh that an array lives on, where an equation leads from it to another."""
    mesh, current = jax.typeof(array).sharding.mesh, get_abstract_mesh()
    if mesh.empty or current.empty or mesh == current:
        return nullcontext()
    return use_abstract_mesh(mesh)
