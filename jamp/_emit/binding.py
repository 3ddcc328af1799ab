"""What is emitted has the source of its equation; arrays are cast on their mesh."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import current_name_stack, user_context
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from jamp._compat import settings


@contextmanager
def source_of(eqn: JaxprEqn, *inside: JaxprEqn) -> Iterator[None]:
    """Gives what is emitted inside the source, scopes and settings of an equation.

    Args:
      eqn: the equation.
      *inside: equations inside of it, the outermost first.
    """
    names = current_name_stack() + eqn.source_info.name_stack
    with user_context(eqn.source_info.traceback, name_stack=names), settings(eqn):
        if not inside:
            yield
        else:
            with source_of(*inside):
                yield


def convert(array: Any, dtype: Any) -> Any:
    """An array in a dtype, on the mesh that it lives on."""
    if jax.typeof(array).dtype == dtype:
        return array
    with _mesh_of(array):
        return jax.lax.convert_element_type(array, dtype)


def convert_all(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Arrays in dtypes; None leaves one as it is."""
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
