"""flax.nnx modules in a traced function: their state goes in, and comes out updated.

The modules of a call are split into a structure and their arrays; the arrays are
traced, and what the function made of both is done to the modules. Modules of flax.linen
that collect variables as a side effect are refused. flax is not imported for it.
"""

import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._errors import AutocastError, AutocastTypeError
from jamp._tracing.cache_key import Constant
from jamp._tracing.checks import refuse_made
from jamp._tracing.nnx_graph import (
    Copies,
    apply,
    is_node,
    paths,
    put_back,
    split,
    taken_out,
)
from jamp._tracing.trace import pass_for


class Prepared(NamedTuple):
    """A call whose arguments hold arrays where modules were."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]  # updates the modules; returns the user's result
    # Gives where in the modules each object is, by its number in a change.
    paths: Callable[[], Mapping[int, tuple[Any, ...]]] = dict


def is_module(value: Any) -> bool:
    """Whether a value is a module of flax.nnx, or another such object with state."""
    nnx = sys.modules.get("flax.nnx")
    return isinstance(value, getattr(nnx, "Pytree", ()))


def is_stateful(value: Any) -> bool:
    """Whether a value is a module or a variable of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and is_node(nnx, value)


def unwrap(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call that a call of a `functools.partial` makes, or the same call."""
    while isinstance(fn, partial):
        args, kwargs = (*_bound(fn.args), *args), {**_bound(fn.keywords), **kwargs}
        fn = fn.func
    return fn, args, kwargs


def _bound(tree: Any) -> Any:
    def marked(leaf: Any) -> Any:
        return Constant(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    return jax.tree.map(marked, tree, is_leaf=is_stateful)


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
    fn, args, kwargs = unwrap(fn, args, kwargs)
    _refuse_linen(fn, args)
    as_it_is = Prepared(_followed(fn, returned), args, kwargs, lambda result: result)
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return as_it_is
    own, with_modules = _own_modules(fn, nnx)
    modules = [*own]
    held = taken_out(nnx, (args, kwargs), modules)
    if not modules:
        return as_it_is
    if not hasattr(nnx, "graphlib"):
        raise AutocastError(
            "modules of flax.nnx need Flax 0.12.7 or newer: update flax"
        )
    graph = split(nnx, modules)

    def call(structure: Any, state: Any, held: Any) -> Any:
        copies = Copies(nnx, structure, state)
        found: list[Any] = []
        given_args, given_kwargs = put_back(held, copies.modules.__getitem__)
        called = _followed(with_modules(copies.modules), returned)
        result = called(*given_args, **given_kwargs)
        result = taken_out(nnx, result, found)
        refuse_made(result, jax.tree.leaves(held))
        return result, copies.changes(found)

    pass_for(fn, call)

    def finish(result: Any) -> Any:
        value, change = result
        if change is None:
            return value
        found = apply(nnx, change, graph.numbers)
        return put_back(value, found.__getitem__) if found else value

    packed = (graph.structure, graph.state, held)
    where = partial(paths, nnx, modules, graph.numbers)
    return Prepared(call, packed, {}, finish, where)


def _followed(
    fn: Callable[..., Any], returned: Callable[[Any], Any] | None
) -> Callable[..., Any]:
    if returned is None:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        return returned(fn(*args, **kwargs))

    pass_for(fn, call)
    return call


def _refuse_linen(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises for a module of flax.linen: without parameters, or with some that leak."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return
    if isinstance(fn, linen.Module) and fn.scope is None and fn.parent is None:
        name = type(fn).__name__
        raise AutocastTypeError(
            f"autocast takes a function, got the flax.linen module {name}, which holds "
            "no parameters: wrap its apply, as in jamp.autocast(model.apply)(params, x)"
        )
    for value in (fn, getattr(fn, "__self__", None), *args[:1]):
        if not isinstance(value, linen.Module) or value.scope is None:
            continue
        # What is bound to variables that are only read may be called in a trace; and
        # what `nn.compact` marked is not known for it any more.
        if value.scope.mutable is not False or hasattr(fn, "compact"):
            raise AutocastTypeError(
                f"a bound flax.linen module ({type(value).__name__}) collects its "
                "variables as a side effect: wrap the function that calls model.apply"
            )


def value_and_grad(*arguments: Any) -> Callable[..., Any]:
    """The `value_and_grad` for arguments: flax.nnx's for what has state, or JAX's.

    JAX's takes a module for a tree of parameters, and loses what a call changes in it.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return jax.value_and_grad

    def is_leaf(node: Any) -> bool:
        # Of an `nnx.State` a call gets the arrays.
        return isinstance(node, nnx.State) or is_stateful(node)

    found = any(map(is_stateful, jax.tree.leaves(arguments, is_leaf=is_leaf)))
    return nnx.value_and_grad if found else jax.value_and_grad


def is_argnum(value: Any) -> bool:
    """Whether a value says at which argument to differentiate."""
    nnx = sys.modules.get("flax.nnx")
    return isinstance(value, Integral) or (
        nnx is not None and isinstance(value, nnx.DiffState)
    )


def _own_modules(fn: Any, nnx: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The modules that a function is, is bound to or closes over.

    And what makes the function anew with those that a list begins with in their place.
    """
    if is_node(nnx, fn):
        return [fn], lambda copies: copies[0]
    method = isinstance(fn, types.MethodType)
    if method and is_node(nnx, fn.__self__):
        return [fn.__self__], lambda copies: types.MethodType(fn.__func__, copies[0])
    cells = () if method else getattr(fn, "__closure__", None) or ()
    own = [v for v in map(_content, cells) if is_node(nnx, v)]

    def with_modules(copies: list[Any]) -> Any:
        if not own:
            return fn
        new = iter(copies)
        closure = tuple(
            types.CellType(next(new)) if is_node(nnx, _content(cell)) else cell
            for cell in cells
        )
        copy = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure
        )
        copy.__kwdefaults__ = fn.__kwdefaults__
        return copy

    return own, with_modules


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
