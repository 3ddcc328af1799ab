"""A call as it is traced: of a partial the function in it, of modules their arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jamp._tracing import nnx_modules
from jamp._tracing.cache_key import Constant
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
    return found or Prepared(follow(fn), args, kwargs, lambda result: result)


def without_partials(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call that a call of a `functools.partial` makes, or the same call."""
    while isinstance(fn, partial):
        args, kwargs = (*_bound(fn.args), *args), {**_bound(fn.keywords), **kwargs}
        fn = fn.func
    return fn, args, kwargs


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
