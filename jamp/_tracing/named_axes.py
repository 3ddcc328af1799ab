"""Derivative rules inside of `jax.vmap(..., axis_name=...)`.

JAX may run a rule when the axis that it sums over, as `jax.lax.psum` does, has its name
no more. Where the rule is traced then, the axis is given its name again.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from jax.extend.linear_util import transformation2
from jax.sharding import get_abstract_mesh

from jamp._compat import extend_axis_env_nd, get_axis_env

_Axes = tuple[tuple[Any, int], ...]


def _mapped_axes() -> _Axes:
    """The named axes here, without those of a mesh, which keep their names."""
    mesh, sizes = get_abstract_mesh().axis_names, get_axis_env().axis_sizes
    return tuple((name, size) for name, size in sizes.items() if name not in mesh)


def _run(rule: Callable[..., Any], axes: _Axes, *arrays: Any, **options: Any) -> Any:
    there = get_axis_env().axis_sizes
    gone = [(name, size) for name, size in axes if name not in there]
    with extend_axis_env_nd(gone):
        return rule(*arrays, **options)


_in_axes = transformation2(_run)


def in_axes_of_now(rule: Any) -> Any:
    """A rule, as JAX hands it on or as a function, that knows the axes of this call."""
    axes = _mapped_axes()
    if not axes:
        return rule
    if isinstance(rule, FunctionType):
        return wraps(rule)(lambda *arrays: _run(rule, axes, *arrays))
    return _in_axes(rule, axes)
