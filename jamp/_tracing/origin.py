"""Where an equation came from: a listed function, and the user's line.

Every equation remembers the Python frames that emitted it. Consecutive equations of one
call of a listed function are ruled as a whole by its policy.
"""

import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

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


_STDLIB = sysconfig.get_paths()["stdlib"]
_JAMP = str(Path(__file__).parents[1])


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a source file is neither jamp's, nor a library's, nor Python's."""
    return not (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith((_STDLIB, _JAMP, "<frozen"))
    )


def users_level() -> int:
    """The stacklevel, for the caller, of a warning at the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def location(eqn: JaxprEqn) -> Location | None:
    """The innermost line of the user's own code that led to an equation."""
    found = frames(eqn)
    if found is None:
        return None
    for code, offset in zip(*found, strict=True):
        if is_users(code.co_filename):
            return Location(code.co_filename, _line(code, offset), code.co_name)
    return None


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
