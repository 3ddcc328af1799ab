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
    """The modules that a function is, is bound to or closes over, through functions.

    And what makes the function anew with those that a list begins with in their place.
    """
    closures = _closures(fn)
    held = [fn, *(value for values in closures.values() for value in values)]
    own = {id(one): one for one in map(_owner, held) if is_node(nnx, one)}
    # Modules, and the functions that close over one, or over such a function.
    taken, before = set(own), 0
    while own and len(taken) > before:
        before = len(taken)
        for number, values in closures.items():
            if any(id(_owner(value)) in taken for value in values):
                taken.add(number)

    def with_modules(copies: list[Any]) -> Any:
        found = dict(zip(own, copies, strict=False))
        cells: dict[int, types.CellType] = {}  # which functions share

        def anew(value: Any) -> Any:
            if isinstance(value, types.MethodType):
                return types.MethodType(value.__func__, anew(value.__self__))
            if id(value) in found or id(value) not in taken:
                return found.get(id(value), value)
            return _with_closure(value, tuple(map(cell_anew, value.__closure__)))

        def cell_anew(cell: types.CellType) -> types.CellType:
            held = _content(cell)
            if id(_owner(held)) not in taken:
                return cell
            if id(cell) not in cells:
                # Known first: a function may close over itself.
                cells[id(cell)] = types.CellType()
                cells[id(cell)].cell_contents = anew(held)
            return cells[id(cell)]

        return anew(fn)

    return list(own.values()), with_modules


def _closures(fn: Any) -> dict[int, list[Any]]:
    """What a function closes over, and the functions therein, by their ids."""
    found: dict[int, list[Any]] = {}
    todo = [fn]
    while todo:
        one = todo.pop()
        if isinstance(one, types.FunctionType) and id(one) not in found:
            found[id(one)] = list(map(_content, one.__closure__ or ()))
            todo += found[id(one)]
    return found


def _owner(value: Any) -> Any:
    return value.__self__ if isinstance(value, types.MethodType) else value


def _with_closure(fn: Any, closure: tuple[types.CellType, ...]) -> Any:
    copy = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    vars(copy).update(vars(fn))
    return copy


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
