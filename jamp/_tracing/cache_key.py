"""The programs of eager calls, and the key under which a call finds an earlier one."""

import enum
import threading
import types
import weakref
from collections.abc import Hashable
from inspect import unwrap
from typing import Any

import jax
import numpy as np

from jamp._compat import trace_context
from jamp._equations.content import is_key
from jamp._tracing.checks import is_array

# How many programs a function keeps for its eager calls.
_MOST_PROGRAMS = 128


class Programs:
    """The programs of eager calls that were used last, for several threads.

    A copy of it, pickled or not, is empty.
    """

    def __init__(self, most: int = _MOST_PROGRAMS) -> None:
        self._most = most
        self._entries: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Programs, (self._most,)

    def get(self, key: Hashable) -> Any:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
            return entry

    def put(self, key: Hashable, entry: Any) -> None:
        with self._lock:
            self._entries[key] = entry
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]


class Constant:
    """A NumPy value that a `functools.partial` holds: as for JAX, a constant."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_CONSTANTS = (
    *(bool, int, str, bytes, enum.Enum, np.dtype, type, types.EllipsisType),
    Constant,
)
# They have a hash, and are made anew wherever they are read.
_METHODS = (types.MethodType, types.BuiltinMethodType)
# Packages whose objects that wrap a function hold nothing that changes.
_WRAPPING = ("flax", "jax", "jaxlib")


def innermost(fn: Any) -> Any:
    """The function in what wraps it, up to what may hold something else.

    As a method does, which seems to wrap what its function wraps.
    """
    return unwrap(fn, stop=lambda found: not _only_wraps(found))


def _only_wraps(found: Any) -> bool:
    if isinstance(found, types.FunctionType):
        return True
    return type(found).__module__.partition(".")[0] in _WRAPPING


def _is_function(found: Any) -> bool:
    """Whether something is a function, bound to no object."""
    if isinstance(found, types.BuiltinFunctionType):
        return isinstance(found.__self__, (types.ModuleType, types.NoneType))
    return isinstance(found, types.FunctionType)


def signature(given: Any, options: Hashable) -> Hashable:
    """What a trace depends on, or None if equal calls cannot be told by it.

    Args:
      given: the arguments, and what stands behind the function, as a tree.
      options: those of autocast.
    """
    leaves, tree = jax.tree.flatten(given)
    parts = [jax.typeof(leaf) if is_array(leaf) else _static(leaf) for leaf in leaves]
    if None in parts:
        return None
    key = (options, tree, tuple(parts), trace_context())
    return key if is_key(key) else None


def _static(leaf: Any) -> Hashable:
    """A leaf that is no array, as part of a key: 1 is not True, nor 0.0 -0.0."""
    kind = type(leaf)
    if isinstance(leaf, (float, complex)):
        return kind, repr(leaf)
    if isinstance(leaf, _CONSTANTS):
        return kind, leaf
    if isinstance(leaf, np.generic):
        return None  # not all that JAX does not have can be hashed
    hashing: Any = kind.__hash__
    by_identity = hashing is object.__hash__ or isinstance(leaf, _METHODS)
    # A function may be wrapped, by JAX or a decorator.
    if by_identity and not _is_function(innermost(leaf)):
        return None  # it may hold something else by the next call
    try:
        return kind, hash(leaf), weakref.ref(leaf)
    except TypeError:
        return None
