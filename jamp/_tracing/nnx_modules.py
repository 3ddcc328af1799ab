"""flax.nnx modules in a traced function: their state goes in, and comes out updated.

The modules of a call are split into a structure and their arrays; the arrays are
traced, and what the function made of them is written back. Modules of flax.linen that
collect variables as a side effect are refused. flax is not imported for it.
"""

import sys
import types
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import jax

from jamp._dtypes import FLOAT32
from jamp._errors import AutocastTypeError
from jamp._tracing.casts import kept_float32
from jamp._tracing.checks import refuse_made
from jamp._tracing.trace import pass_for


class Slot(int):
    """Stands in the arguments for the module of this number."""


class Prepared(NamedTuple):
    """A call whose arguments hold arrays where modules were."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]  # updates the modules; returns the user's result


def unwrap(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call that a call of a `functools.partial` makes, or the same call."""
    while isinstance(fn, partial):
        args, kwargs = (*fn.args, *args), {**fn.keywords, **kwargs}
        fn = fn.func
    return fn, args, kwargs


def prepare(fn: Callable[..., Any], args: Any, kwargs: Any) -> Prepared:
    """Takes the state out of the modules of a call, if there are any."""
    fn, args, kwargs = unwrap(fn, args, kwargs)
    _refuse_collecting(fn, args)
    as_it_is = Prepared(fn, args, kwargs, lambda result: result)
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return as_it_is
    own, with_modules = _own_modules(fn, nnx)
    modules = [*own]

    def slot(leaf: Any) -> Any:
        if not is_node(nnx, leaf):
            return leaf
        modules.append(leaf)
        return Slot(len(modules) - 1)

    held = jax.tree.map(slot, (args, kwargs), is_leaf=partial(is_node, nnx))
    if not modules:
        return as_it_is
    structure, state = nnx.split(modules)

    def call(structure: Any, state: Any, held: Any) -> Any:
        # Merging may take the variables of the state as they are.
        before = {
            path: jax.tree.leaves(leaf) for path, leaf in nnx.to_flat_state(state)
        }
        copies = nnx.merge(structure, state)
        given = jax.tree.map(
            lambda leaf: copies[leaf] if isinstance(leaf, Slot) else leaf, held
        )
        result = with_modules(copies)(*given[0], **given[1])
        refuse_made(result, jax.tree.leaves(given))
        return result, _changed(nnx, before, nnx.split(copies)[1])

    pass_for(fn, call)

    def finish(result: Any) -> Any:
        value, state = result
        nnx.update(modules, state)
        return value

    return Prepared(call, (structure, state, held), {}, finish)


def _refuse_collecting(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises for a bound module of flax.linen, whose variables would leak tracers."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return
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


def _changed(nnx: Any, before: dict[Any, list[Any]], after: Any) -> Any:
    """What a call changed in a state; the rest may not even be written, under jit.

    What was float32 before stays float32.
    """
    kept = []
    for path, leaf in nnx.to_flat_state(after):
        (arrays, structure), known = jax.tree.flatten(leaf), before.get(path, [])
        if list(map(id, arrays)) == list(map(id, known)):
            continue
        if len(arrays) == len(known):
            arrays = [
                kept_float32(array) if old.dtype == FLOAT32 else array
                for array, old in zip(arrays, known, strict=True)
            ]
        kept.append((path, jax.tree.unflatten(structure, arrays)))
    return nnx.from_flat_state(kept)


def value_and_grad(*arguments: Any) -> Callable[..., Any]:
    """The `value_and_grad` for arguments: flax.nnx's for modules and `Rngs`, or JAX's.

    JAX's takes a module for a tree of parameters, and loses what a call changes in it.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return jax.value_and_grad

    def changes(node: Any) -> bool:
        return isinstance(node, nnx.Module | nnx.Rngs)

    found = any(map(changes, jax.tree.leaves(arguments, is_leaf=changes)))
    return nnx.value_and_grad if found else jax.value_and_grad


def is_argnum(value: Any) -> bool:
    """Whether a value says at which argument to differentiate."""
    nnx = sys.modules.get("flax.nnx")
    return isinstance(value, Integral) or (
        nnx is not None and isinstance(value, nnx.DiffState)
    )


def is_node(nnx: Any, value: Any) -> bool:
    """Whether a value is a module, or another thing of flax.nnx that has state."""
    return isinstance(value, (nnx.Module, nnx.Rngs, nnx.Variable))


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
