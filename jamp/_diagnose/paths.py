"""What the leaves of a call are called, whose modules may be held as arrays."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from jamp._tracing import nnx_modules

Path = tuple[Any, ...]

# For each module its path; None in a call without modules.
ModulePaths = Mapping[int, Path] | None
# What the first key of a path stands for.
_ROOTS = ("args", "kwargs")
# In a state, the last key leads into a variable.
_VALUE = jax.tree_util.GetAttrKey("value")


def find_paths(
    args: Any, kwargs: Any, call: nnx_modules.Prepared
) -> tuple[list[Path], ModulePaths]:
    """The user's path of each leaf of a prepared call, and that of each module.

    A path begins with a root and a key.
    """
    packed = call.args is not args
    nnx = sys.modules.get("flax.nnx")
    is_module = partial(nnx_modules.is_node, nnx) if packed else None
    given = jax.tree.leaves_with_path((args, kwargs), is_leaf=is_module)
    paths: list[Path] = [(_ROOTS[path[0].idx], *path[1:]) for path, _ in given]
    if not packed:
        return paths, None
    _, state, held = call.args
    # A module's number stands in its place.
    modules = {
        slot.index: path
        for path, (_, leaf), slot in zip(paths, given, held, strict=True)
        if slot is not leaf
    }
    inside = [in_module(path, modules) for path, _ in jax.tree.leaves_with_path(state)]
    return [*inside, *paths], modules


def in_module(path: Path, modules: Mapping[int, Path]) -> Path:
    """The user's path of an array of the modules' state."""
    # Other modules are the function itself, or it is bound to them or closes over them.
    module = modules.get(path[0].key, ("module", path[0]))
    return (*module, *(key for key in path[1:] if key != _VALUE))


def label_of(path: Path) -> str:
    """A path as the user writes it."""
    root, keys = path[0], path[1:]
    return f"{root}{jax.tree_util.keystr(keys)}"
