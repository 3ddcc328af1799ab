"""Functions that JAX makes while it traces, as results: pullbacks, linear functions.

They are pytrees of arrays, and run a program on these in the dtypes that it was made
in. So they get the arrays in those dtypes, and what autocast returned in 16 bits, as a
cotangent of it is, is widened for them.
"""

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax.tree_util import Partial

from jamp._dtypes import widened

# The module whose functions make them.
_API = inspect.unwrap(jax.vjp).__globals__["__name__"]


def _made(node: Any) -> bool:
    """Whether something is a function that JAX made, a pytree of what it keeps."""
    if not callable(node) or jax.tree_util.all_leaves([node]):
        return False
    while isinstance(node, partial):
        # JAX wraps the one that is kept by one that is a pytree.
        node = getattr(node.func, "fun", node.func)
    return bool(getattr(node, "__module__", None) == _API)


def in_functions(result: Any) -> list[bool]:
    """Which leaves of a result belong to functions made while tracing."""
    nodes = jax.tree.leaves(result, is_leaf=_made)
    return [_made(node) for node in nodes for _ in jax.tree.leaves(node)]


def widening(result: Any) -> Any:
    """A result whose functions made while tracing also take 16 bits for float32."""
    return jax.tree.map(
        lambda node: Partial(_call, node) if _made(node) else node,
        result,
        is_leaf=_made,
    )


def _call(function: Any, *args: Any) -> Any:
    with suppress(TypeError, ValueError):
        return function(*args)
    return function(*jax.tree.map(widened, args))
