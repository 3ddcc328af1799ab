"""What a call makes of modules of flax.nnx, as a value that its program returns.

The function gets copies of the modules. Each object in these, a module or a variable,
is compared after the call with what it was. Those that changed are returned, with what
is new in them, as a structure and its arrays, in which every object that the caller has
is a number; and the caller's own objects are changed alike.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jamp._dtypes import FLOAT32
from jamp._errors import AutocastTypeError
from jamp._tracing.checks import is_array
from jamp._tracing.users_casts import kept_float32

# What an object holds, by name: leaves and the structure of each part.
_Parts = dict[str, tuple[list[Any], Any]]

# The name of what a variable holds, among those of its metadata.
_VALUE = "raw value"


class Slot(int):
    """Stands for the module or variable of this number, where that was found."""


class Held(dict[Any, Any]):
    """What flax.nnx found in objects, by the parts of its path, in Flax's order.

    Unlike in a dict or an `nnx.State`, whose names JAX sorts, numbers and strings may
    stand beside each other, as in an `nnx.List` with an attribute.
    """


def _with_keys(held: Held) -> tuple[list[Any], tuple[Any, ...]]:
    return [(jax.tree_util.DictKey(k), v) for k, v in held.items()], tuple(held)


jax.tree_util.register_pytree_with_keys(
    Held, _with_keys, lambda names, parts: Held(zip(names, parts, strict=True))
)


class Graph(NamedTuple):
    """Objects of flax.nnx, split."""

    structure: Any
    state: Held  # their arrays
    numbers: Any  # the number of each object in the structure


class Change(NamedTuple):
    """What a call changed, by number, and the objects in its result, split as one."""

    structure: Any
    state: Held


def is_node(nnx: Any, value: Any) -> bool:
    """Whether a value is a module, or another thing of flax.nnx that has state."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def taken_out(nnx: Any, tree: Any, found: list[Any]) -> Any:
    """A tree with slots for the objects in it, which are appended to those found."""

    def slot(leaf: Any) -> Any:
        if not is_node(nnx, leaf):
            return leaf
        found.append(leaf)
        return Slot(len(found) - 1)

    return jax.tree.map(slot, tree, is_leaf=partial(is_node, nnx))


def put_back(tree: Any, at: Callable[[Slot], Any]) -> Any:
    """A tree with what belongs there in the place of slots."""
    return jax.tree.map(lambda leaf: at(leaf) if isinstance(leaf, Slot) else leaf, tree)


def split(nnx: Any, modules: list[Any]) -> Graph:
    numbers = nnx.graphlib.RefMap()
    structure, state = nnx.flatten(modules, ref_index=numbers, graph=True)
    return Graph(structure, _held(state), numbers)


def _held(state: Any) -> Held:
    held = Held()
    for path, value in state:
        inner = held
        for name in path[:-1]:
            inner = inner.setdefault(name, Held())
        inner[path[-1]] = value
    return held


def _leaves(held: Held) -> list[Any]:
    return jax.tree.leaves(held, is_leaf=lambda part: not isinstance(part, Held))


def paths(nnx: Any, modules: list[Any], numbers: Any) -> dict[int, tuple[Any, ...]]:
    """Where an object of a number is first found in modules."""
    everything = nnx.iter_graph(modules, graph=True)
    return {numbers[node]: path for path, node in everything if node in numbers}


class Copies:
    """Modules made of a structure and a state, and what they hold at first."""

    def __init__(self, nnx: Any, structure: Any, state: Held) -> None:
        self._nnx = nnx
        self._objects = nnx.graphlib.IndexMap()
        leaves = _leaves(state)
        self.modules = nnx.unflatten(structure, leaves, index_ref=self._objects)
        self._before = {n: _parts(nnx, node) for n, node in self._objects.items()}

    def changes(self, found: list[Any]) -> Change | None:
        """What changed in them, and the objects found in a result; None if neither.

        What was float32 before stays float32.
        """
        nnx, changed = self._nnx, {}
        unchanged = nnx.graphlib.RefMap()
        for number, node in self._objects.items():
            before, after = self._before[number], _parts(nnx, node)
            if _same(before, after):
                unchanged[node] = _known(number)
            else:
                _keep_float32(nnx, node, before, after)
                changed[number] = node
        if not changed and not found:
            return None
        structure, state = nnx.flatten(
            (changed, found),
            ref_index=unchanged,
            ref_outer_index=nnx.graphlib.RefMap.from_indexmap(self._objects),
            graph=True,
        )
        _refuse_static_arrays(structure)
        return Change(structure, _held(state))


def apply(nnx: Any, change: Change, numbers: Any) -> list[Any]:
    """Changes the caller's objects; returns those of the result.

    Args:
      nnx: flax.nnx.
      change: what the call made of their copies.
      numbers: the numbers that they have.
    """
    objects = nnx.graphlib.IndexMap.from_refmap(numbers)
    for part in change.structure.nodes:
        number = getattr(part, "outer_index", None)
        if number is not None:
            _refuse_foreign(nnx, objects[number])
    known = {_known(number): node for number, node in objects.items()}
    _, found = nnx.unflatten(
        change.structure,
        _leaves(change.state),
        index_ref=nnx.graphlib.IndexMap(known),
        outer_index_outer_ref=objects,
    )
    return list(found)


def spelled_out(value: Any, change: Change | None) -> tuple[Any, Any]:
    """A result with arrays in the place of slots; those of what changed, by number."""
    if change is None:
        return value, {}
    changed, found = (change.state.get(part, {}) for part in range(2))
    return put_back(value, lambda slot: found.get(slot, {})), changed


def _known(number: int) -> int:
    """The number of an object that did not change, among those of a change."""
    return -1 - number  # Flax counts the others from zero on


def _parts(nnx: Any, node: Any) -> _Parts:
    if isinstance(node, jax.core.Tracer):
        return {}  # a hijax variable under jax.jit, which is changed in place
    if isinstance(node, nnx.Variable):
        held = {_VALUE: node.get_raw_value(), **node.get_metadata()}
    else:
        held = getattr(node, "__dict__", {})
    is_leaf = partial(is_node, nnx)
    return {name: jax.tree.flatten(part, is_leaf) for name, part in held.items()}


def _same(before: _Parts, after: _Parts) -> bool:
    """Whether an object holds the very same leaves as before; they may not compare."""
    return before.keys() == after.keys() and all(
        tree == after[name][1] and all(map(operator.is_, leaves, after[name][0]))
        for name, (leaves, tree) in before.items()
    )


def _keep_float32(nnx: Any, node: Any, before: _Parts, after: _Parts) -> None:
    for name in before.keys() & after.keys():
        (known, _), (leaves, tree) = before[name], after[name]
        if len(known) != len(leaves):
            continue
        kept = list(map(_kept, known, leaves))
        if all(map(operator.is_, kept, leaves)):
            continue
        part = jax.tree.unflatten(tree, kept)
        if isinstance(node, nnx.Variable):
            node.set_raw_value(part)
        else:
            vars(node)[name] = part


def _kept(known: Any, leaf: Any) -> Any:
    if leaf is known or not (is_array(known) and is_array(leaf)):
        return leaf
    return kept_float32(leaf) if known.dtype == FLOAT32 else leaf


def _refuse_static_arrays(structure: Any) -> None:
    """Raises for what was traced in an attribute that Flax takes for a constant."""
    for name, attribute in structure.attributes:
        leaves = jax.tree.leaves(getattr(attribute, "value", None))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise AutocastTypeError(
                f"the function under autocast put an array into the attribute {name!r} "
                "of a flax.nnx module, which is static: make it an nnx.Variable, an "
                "nnx.List or an nnx.Dict, or mark it with nnx.data"
            )


def _refuse_foreign(nnx: Any, node: Any) -> None:
    """Has Flax raise for an object of another trace than the one that goes on.

    Changing a structure it asks nothing; setting what is there already it does.
    """
    if isinstance(node, nnx.Variable):
        node.set_raw_value(node.get_raw_value())
        return
    for name, value in [*vars(node).items()][:1]:
        setattr(node, name, value)
