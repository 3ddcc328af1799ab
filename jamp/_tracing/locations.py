"""Where an equation came from: a listed function, and the user's line.

Every equation remembers the Python frames that emitted it. Consecutive equations of one
call of a listed function are ruled as a whole by its policy.
"""

import enum
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import digits
from types import CodeType
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp._compat import frames
from jamp._policy.functions import Function


@dataclass(frozen=True)
class Call:
    """One call of a listed function, told from others by the frames that led to it."""

    function: Function
    key: tuple[Any, ...]


# Ids of the code objects of frames, innermost first, and the offset in each. Ids,
# because hashing or comparing code objects goes through their instructions.
FrameKey = tuple[tuple[int, ...], Sequence[int]]


def frame_key(eqn: JaxprEqn, *, users: bool = False) -> FrameKey | None:
    """What identifies the frames of an equation; None if it has no traceback.

    Args:
      eqn: the equation.
      users: whether only frames from the user's innermost one on count.
    """
    codes, offsets = frames(eqn)
    if not codes:
        return None
    if users:
        first = users_frame(code.co_filename for code in codes)
        first = len(codes) if first is None else first
        codes, offsets = codes[first:], offsets[first:]
    return tuple(map(id, codes)), offsets


class Listed:
    """The functions that a policy lists, found by the ids of their code.

    To hash code would take longer. It is held, so that its id stays taken.
    """

    def __init__(self, codes: Sequence[tuple[CodeType, Function]]) -> None:
        self._codes = codes
        self._by_id = {id(code): function for code, function in codes}

    def calls(self, key: FrameKey) -> Iterator[Call]:
        """The calls of these that some frames stand in; the outermost first."""
        ids, offsets = key
        found = self._by_id
        for index in reversed([i for i, code in enumerate(ids) if code in found]):
            yield Call(found[ids[index]], (ids[index:], tuple(offsets[index + 1 :])))


def is_others(eqn: JaxprEqn, call: Call) -> bool:
    """Whether an equation in a library's function is of code that it was handed.

    Not where that only calls the library again, as what intercepts layers does.
    """
    codes, _ = frames(eqn)
    ids, _ = call.key
    # What is jitted, or has a derivative rule, may have been handed over as such.
    programs = jaxprs_in_params(eqn.params)
    files = [*map(_source_file, programs)]
    files += [code.co_filename for code in codes[: -len(ids)]]
    owners = (_owner(file) for file in files if file)
    innermost = next((owner for owner in owners if owner < _Owner.CORE), _Owner.CORE)
    return innermost < _Owner.LIBRARY


def _source_file(program: Any) -> str:
    """The file of the function that a program was traced from; empty if unknown."""
    source = str(program.debug_info.func_src_info)
    return source.partition(" at ")[2].rpartition(":")[0]


def calls_users(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a function of the user's own, or of unknown origin."""
    files = map(_source_file, jaxprs_in_params(eqn.params))
    return any(not file or is_users(file) for file in files)


@dataclass(frozen=True)
class Location:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def short(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


# Packages whose lines are never the user's own; of the core not worth showing either.
_CORE = frozenset("chex jamp jax jaxlib jaxtyping numpy scipy".split())
_LIBRARIES = _CORE | {"equinox", "flax", "haiku", "optax"}
_PATHS = sysconfig.get_paths()
_STANDARD, _SCRIPTS = (os.path.join(_PATHS[name], "") for name in ("stdlib", "scripts"))
_NN = os.path.join(os.path.dirname(jax.__file__), "_src", "nn", "")


class _Owner(enum.IntEnum):
    """Whose a source file is, the nearest to the user first."""

    USER = 0
    INSTALLED = 1  # of a package that is no known library, and may be the user's
    LIBRARY = 2
    CORE = 3  # JAX, and what stands below the libraries as JAX does


@lru_cache(maxsize=4096)
def _owner(filename: str) -> _Owner:
    package = _package(filename)
    if package in _CORE:
        return _Owner.CORE
    if package is not None:
        return _Owner.LIBRARY if package in _LIBRARIES else _Owner.INSTALLED
    if filename.startswith((_STANDARD, "<frozen")):
        return _Owner.CORE
    return _Owner.INSTALLED if filename.startswith(_SCRIPTS) else _Owner.USER


def _package(filename: str) -> str | None:
    """The installed package that a file is of, or the library, wherever that lies."""
    parts = Path(filename).parts[:-1]
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return (*parts, Path(filename).stem)[parts.index(folder) + 1]
    for name in _LIBRARIES:
        # One that is installed for being edited lies where its source is.
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            if filename.startswith(os.path.join(folder, "")):
                return name
    return None


def is_users(filename: str) -> bool:
    """Whether a source file is neither jamp's, nor a known library's, nor Python's."""
    return _owner(filename) < _Owner.LIBRARY


def users_frame(files: Iterable[str]) -> int | None:
    """Which of some frames, by their files, is the first of the user's own.

    The first of an installed package, which may be the user's, if there is none.
    """
    owners = list(map(_owner, files))
    nearest = min(owners, default=_Owner.CORE)
    return owners.index(nearest) if nearest < _Owner.LIBRARY else None


def users_level() -> int:
    """The stacklevel, for the caller, of a warning at the user's own line."""
    around = traceback.walk_stack(sys._getframe(1))
    return (users_frame(frame.f_code.co_filename for frame, _ in around) or 0) + 1


def location(eqn: JaxprEqn) -> Location | None:
    """The innermost line of the user's own code that led to an equation."""
    codes, offsets = frames(eqn)
    index = users_frame(code.co_filename for code in codes)
    return None if index is None else _location(codes[index], offsets[index])


def library_location(eqn: JaxprEqn, function: Function | None) -> Location | None:
    """The innermost line of a library that led to an equation, below the user's line.

    One of `jax.nn` if there is no other; none inside the file of a listed function that
    the equation is part of, which says it all.
    """
    codes, offsets = frames(eqn)
    files = [code.co_filename for code in codes]
    inside = range(users_frame(files) or 0)
    found = [i for i in inside if _owner(files[i]) is _Owner.LIBRARY]
    found += [i for i in inside if files[i].startswith(_NN)]
    of_function = function and function.resolve()
    if not found or (of_function and files[found[0]] == of_function.co_filename):
        return None
    return _location(codes[found[0]], offsets[found[0]])


def _location(code: CodeType, offset: int) -> Location:
    at = (line for start, end, line in code.co_lines() if start <= offset < end)
    line = next(filter(None, at), code.co_firstlineno)
    return Location(code.co_filename, line, code.co_name)


def stem_of(scope: str) -> str:
    """The name of a scope without its number, which modules that are alike share."""
    return scope.rstrip(digits).rstrip("_")  # Haiku's first one has no number
