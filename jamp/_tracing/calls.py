"""A call as it is traced: of a partial the function in it, of modules their arrays."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import jax
import numpy as np

from jamp._tracing import nnx_modules
from jamp._tracing.cache_key import Constant, innermost
from jamp._tracing.checks import refuse_linen
from jamp._tracing.nnx_modules import Prepared
from jamp._tracing.trace import pass_for


def prepare(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    returned: Callable[[Any], Any] | None = None,
) -> Prepared:
    """Takes the state out of the modules of a call, if there are any.

    Args:
      fn: the function.
      args: its arguments.
      kwargs: those by name.
      returned: what the call is to return of the result; by default the result.
    """
    fn, args, kwargs = without_partials(fn, args, kwargs)
    refuse_linen(fn, args)
    follow = partial(_followed, returned=returned)
    found = nnx_modules.packed(fn, args, kwargs, follow)
    found = found or Prepared(follow(fn), args, kwargs, lambda result: result)
    if nnx_modules.is_stateful(getattr(fn, "__self__", fn)):
        return found  # its state is among the arguments by now
    return found._replace(behind=_behind(fn))


def without_partials(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call that a call of a `functools.partial` makes, or the same call."""
    while isinstance(fn, partial):
        args, kwargs = (*_bound(fn.args), *args), {**_bound(fn.keywords), **kwargs}
        fn = fn.func
    return fn, args, kwargs


def _behind(fn: Any) -> list[Any]:
    """The objects that a function is, is bound to or binds, through what wraps them.

    What it closes over is not among them: that is a constant, as for `jax.jit`.
    """
    fn = innermost(fn)
    if isinstance(fn, partial):
        return [*_behind(fn.func), _bound((fn.args, fn.keywords))]
    # A class is static as an argument, but may change: its methods are traced anew.
    if isinstance(fn, MethodType) and not isinstance(fn.__self__, type):
        return [*_behind(fn.__func__), _bound(fn.__self__)]
    return [_bound(fn)]


def _bound(tree: Any) -> Any:
    def marked(leaf: Any) -> Any:
        return Constant(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    return jax.tree.map(marked, tree, is_leaf=nnx_modules.is_stateful)


def _followed(
    fn: Callable[..., Any], returned: Callable[[Any], Any] | None
) -> Callable[..., Any]:
    if returned is None:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        return returned(fn(*args, **kwargs))

    pass_for(fn, call)
    return call
