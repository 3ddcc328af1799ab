"""Emission: casts for one equation, made once, shared and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import current_name_stack, user_context
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from jamp import _dtypes
from jamp._compat import settings
from jamp._dtypes import DType
from jamp._records import Cast, Entry, Record
from jamp._regions import Options
from jamp._values import Value


@dataclass
class Scribe:
    """What happened while one program was rewritten.

    Attributes:
      entries: records of its equations.
      requests: (input, dtype) pairs of inputs that were narrowed.
      changed: whether anything differs from the program as traced.
    """

    entries: list[Entry] = field(default_factory=list)
    requests: set[tuple[int, DType]] = field(default_factory=set)
    changed: bool = False


@contextmanager
def source_of(eqn: JaxprEqn) -> Iterator[None]:
    """Gives what is emitted inside the source, scopes and settings of an equation."""
    name_stack = current_name_stack() + eqn.source_info.name_stack
    with (
        user_context(eqn.source_info.traceback, name_stack=name_stack),
        settings(eqn),
    ):
        yield


def bind(eqn: JaxprEqn, arrays: Sequence[Any], **params: Any) -> list[Any]:
    """Binds an equation's primitive.

    Args:
      eqn: the equation.
      arrays: its operands.
      **params: parameters that differ from the traced ones.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **params})
    results = eqn.primitive.bind(*arrays, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def _mesh_of(value: Value) -> AbstractContextManager[Any]:
    """The mesh that a value lives on, where an equation leads from it to another."""
    mesh, current = value.aval.sharding.mesh, get_abstract_mesh()
    if mesh.empty or current.empty or mesh == current:
        return nullcontext()
    return use_abstract_mesh(mesh)


class Emitter:
    """Makes the casts of one equation and notes them in its record."""

    def __init__(self, record: Record, region: Options, scribe: Scribe):
        self.record = record
        self.region = region
        self.scribe = scribe

    def cast(self, value: Value, dtype: DType) -> Any:
        """The value's array in a dtype; made once and shared, if sharing is on."""
        if value.dtype == dtype:
            return value.array
        self.scribe.changed = True
        if value.constant is not None:
            return np.asarray(value.constant).astype(dtype)[()]
        found = value.casts.get(dtype)
        if found is not None:
            return found
        share = self.region.cache_enabled
        if share and value.slot is not None and dtype.itemsize < value.dtype.itemsize:
            self.scribe.requests.add((value.slot, dtype))
        self.record.casts.append(Cast(value.dtype, dtype, value.aval.shape))
        array = value.prepared.get(dtype)
        if array is None:
            with _mesh_of(value):
                array = jax.lax.convert_element_type(value.array, dtype)
        if share:
            value.casts[dtype] = array
        return array

    def left(self, value: Value, dtype: DType) -> Any:
        """The array as it is, where what takes it casts it to a dtype itself."""
        self.scribe.changed = True
        self.record.casts.append(Cast(value.dtype, dtype, value.aval.shape))
        return value.array

    def converted(self, value: Value, dtype: DType) -> Value:
        """The value itself in a dtype; it remembers what it was made from."""
        if value.dtype == dtype:
            return value
        result = Value.of(self.cast(value, dtype))
        traits = value.traits
        if traits.probability and dtype in _dtypes.LOW_DTYPES:
            traits = traits._replace(rounded=dtype)
        result.traits = traits
        if dtype.itemsize > value.dtype.itemsize and self.region.cache_enabled:
            # Only the way back from a wider dtype loses nothing.
            result.casts[value.dtype] = value.array
        return result
