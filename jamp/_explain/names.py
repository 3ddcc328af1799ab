"""Names of modules, dtypes and lines as reports show them."""

from collections.abc import Iterable
from itertools import chain
from string import digits
from typing import Any

from jamp._tracing.locations import Location

_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}


def spans(names: Iterable[str]) -> str:
    """Names in words: of three or more that count on, the first and the last.

    So too of what would be more than four words.
    """
    found: list[list[str]] = []
    for name in names:
        stem = name.rstrip(digits)
        number = name[len(stem) :]
        if found and number and found[-1][-1] == f"{stem}{int(number) - 1}":
            found[-1].append(name)
        else:
            found.append([name])
    if len(found) > 4:
        found = [[*chain(*found)]]
    ends = ([" ... ".join((s[0], s[-1]))] if len(s) > 2 else s for s in found)
    return ", ".join(chain(*ends))


def short(dtype: Any) -> str:
    return _SHORT.get(str(dtype), str(dtype))


def short_names(dtypes: Iterable[Any]) -> tuple[str, ...]:
    found = dict.fromkeys(d for d in dtypes if d is not None)
    return tuple(dict.fromkeys(map(short, found)))


def line_of(found: Location | None) -> str:
    return found.short if found else ""
