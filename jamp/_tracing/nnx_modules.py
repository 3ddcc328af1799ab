"""flax.nnx modules in a traced function: their state goes in, and comes out updated.

The modules of a call are split into a structure and their arrays; the arrays are
traced, and what the function made of both is done to the modules. flax is not imported
for it.
"""

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jamp._errors import AutocastError
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
    packed: bool = False  # whether there were any
    # Objects of the function's own, which may change as arguments do.
    behind: Sequence[Any] = ()


def is_module(value: Any) -> bool:
    """Whether a value is a module of flax.nnx, or another such object with state."""
    nnx = sys.modules.get("flax.nnx")
    return isinstance(value, getattr(nnx, "Pytree", ()))


def is_stateful(value: Any) -> bool:
    """Whether a value is a module or a variable of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and is_node(nnx, value)


def packed(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    follow: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Prepared | None:
    """A call without the modules that it has; None if it has none.

    Args:
      fn: the function.
      args: its arguments.
      kwargs: those by name.
      follow: makes of the function what is to be called for it.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    own, with_modules = _own_modules(fn, nnx)
    modules = [*own]
    held = taken_out(nnx, (args, kwargs), modules)
    if not modules:
        return None
    if not hasattr(nnx, "graphlib"):
        raise AutocastError(
            "modules of flax.nnx need Flax 0.12.7 or newer: update flax"
        )
    graph = split(nnx, modules)

    def call(structure: Any, state: Any, held: Any) -> Any:
        copies = Copies(nnx, structure, state)
        found: list[Any] = []
        given_args, given_kwargs = put_back(held, copies.modules.__getitem__)
        called = follow(with_modules(copies.modules))
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

    taken = (graph.structure, graph.state, held)
    where = partial(paths, nnx, modules, graph.numbers)
    return Prepared(call, taken, {}, finish, where, packed=True)


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
