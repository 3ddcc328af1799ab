"""Where an equation came from: a listed function, and the user's line.

Every equation remembers the Python frames that emitted it. Consecutive equations of one
call of a listed function are ruled as a whole by its policy.
"""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import jax
from jax.extend.core import JaxprEqn

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


def frame_key(eqn: JaxprEqn) -> FrameKey | None:
    """What identifies the frames of an equation; None if it has no traceback."""
    found = frames(eqn)
    return None if found is None else (tuple(map(id, found[0])), found[1])


def calls(key: FrameKey, functions: Mapping[int, Function]) -> Iterator[Call]:
    """Calls of functions, listed by the id of their code; the outermost first."""
    ids, offsets = key
    hits = [index for index, code in enumerate(ids) if code in functions]
    for index in reversed(hits):
        yield Call(functions[ids[index]], (ids[index:], offsets[index + 1 :]))


@dataclass(frozen=True)
class Location:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


# Whose lines in site-packages are never the user's own.
_LIBRARIES = frozenset(
    "chex equinox flax haiku jamp jax jaxlib jaxtyping numpy optax scipy".split()
)
_PATHS = sysconfig.get_paths()
_FOLDERS = (_PATHS["stdlib"], Path(__file__).parents[1], Path(jax.__file__).parent)
_OTHERS = tuple(os.path.join(folder, "") for folder in _FOLDERS)
_SCRIPTS = os.path.join(_PATHS["scripts"], "")


@lru_cache(maxsize=4096)
def _distance(filename: str) -> int:
    """How far from the user's own a file is: 0, 1 if installed, 2 if a library's."""
    parts = Path(filename).parts[:-1]
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            package = (*parts, Path(filename).stem)[parts.index(folder) + 1]
            return 2 if package in _LIBRARIES else 1
    if filename.startswith((*_OTHERS, "<frozen")):
        return 2
    return 1 if filename.startswith(_SCRIPTS) else 0


def is_users(filename: str) -> bool:
    """Whether a source file is neither jamp's, nor a known library's, nor Python's."""
    return _distance(filename) < 2


def users_frame(files: Iterable[str]) -> int | None:
    """Which of some frames, by their files, is the first of the user's own.

    The first of an installed package, which may be the user's, if there is none.
    """
    distances = list(map(_distance, files))
    nearest = min(distances, default=2)
    return distances.index(nearest) if nearest < 2 else None


def users_level() -> int:
    """The stacklevel, for the caller, of a warning at the user's own line."""
    around = traceback.walk_stack(sys._getframe(1))
    return (users_frame(frame.f_code.co_filename for frame, _ in around) or 0) + 1


def location(eqn: JaxprEqn) -> Location | None:
    """The innermost line of the user's own code that led to an equation."""
    codes, offsets = frames(eqn) or ((), ())
    index = users_frame(code.co_filename for code in codes)
    if index is None:
        return None
    code = codes[index]
    return Location(code.co_filename, _line(code, offsets[index]), code.co_name)


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
