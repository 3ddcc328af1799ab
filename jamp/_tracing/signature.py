"""What the trace of an eager call depends on, so that an equal call need not trace."""

import enum
import inspect
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jamp._compat import trace_context
from jamp._tracing.checks import is_array

_CONSTANTS = (bool, int, str, bytes, enum.Enum, np.dtype, type, types.EllipsisType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def signature(leaves: Sequence[Any], tree: Any, options: Hashable) -> Hashable:
    """What a trace depends on, or None if equal calls cannot be told by it."""
    parts = [jax.typeof(leaf) if is_array(leaf) else _static(leaf) for leaf in leaves]
    if None in parts:
        return None
    key = (options, tree, tuple(parts), trace_context())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _static(leaf: Any) -> Hashable:
    """A leaf that is no array, as part of a key: 1 is not True, nor 0.0 -0.0."""
    kind = type(leaf)
    if isinstance(leaf, (float, complex)):
        return kind, repr(leaf)
    if isinstance(leaf, _CONSTANTS):
        return kind, leaf
    by_identity: Any = object.__hash__
    if kind.__hash__ is by_identity and not _is_function(leaf):
        return None  # it may hold something else by the next call
    try:
        return kind, hash(leaf), weakref.ref(leaf)
    except TypeError:
        return None


def _is_function(leaf: Any) -> bool:
    """Whether a leaf is a function, or one that JAX or a decorator wrapped."""
    return isinstance(inspect.unwrap(leaf), _FUNCTIONS)
