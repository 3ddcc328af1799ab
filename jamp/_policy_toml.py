"""Reads and validates policy tables."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jamp._dtypes import DType
from jamp._errors import PolicyError
from jamp._functions import Function
from jamp._rule import (
    BUILTIN,
    RULE_NAMES,
    Rule,
    Unsafe,
    check_primitive,
    to_dtype,
    to_rule,
)

_BUILTIN_FILES = tuple(f"{name}.toml" for name in (*BUILTIN, "base"))
_TOP_KEYS = ("name", "dtype", "extends", "unsafe", "results", *RULE_NAMES)
_UNSAFE_KEYS = ("primitives", "of", "dtype", "advice")


class Table(NamedTuple):
    """What a table and those that it extends say; as in `jamp.Policy`."""

    name: str
    dtype: DType
    primitives: tuple[tuple[str, Rule], ...]
    functions: tuple[tuple[Function, Rule], ...]
    unsafe: tuple[Unsafe, ...]
    activation_results: tuple[Function, ...]


def read_file(source: str | Path) -> Table:
    """Reads a TOML file; see `Policy.load`."""
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"cannot read policy {str(source)!r}: give one of {', '.join(BUILTIN)} or "
            f"the path of a TOML file ({error})"
        ) from error
    return _parse(text, str(path))


@cache
def read_builtin(name: str) -> Table:
    """Reads a table that comes with jamp."""
    resource = files("jamp.policies").joinpath(f"{name}.toml")
    return _parse(resource.read_text(encoding="utf-8"), f"{name}.toml")


def _parse(text: str, file: str) -> Table:
    with _located(file):
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"not valid TOML: {error}") from error
        _check_keys(table, _TOP_KEYS, "")
        base = _base(table.get("extends"))
    primitives = dict(base.primitives) if base else {}
    functions = dict(base.functions) if base else {}
    seen: dict[str | Function, str] = {}
    for name in RULE_NAMES:
        for key, entry in _entries(table.get(name, {}), name, file):
            if entry in seen:
                with _located(file, key):
                    raise PolicyError(f"{entry!r} is listed under {seen[entry]} too")
            seen[entry] = key
            rules: dict[Any, Rule] = primitives if isinstance(entry, str) else functions
            rules[entry] = to_rule(name)
    with _located(file, "dtype"):
        dtype = base.dtype if base and "dtype" not in table else None
        dtype = dtype or to_dtype(table.get("dtype"))
    name = table.get("name", Path(file).stem)
    with _located(file, "name"):
        if not isinstance(name, str):
            raise PolicyError(f"must be a string, got {name!r}")
    unsafe = base.unsafe if base else ()
    if "unsafe" in table:
        unsafe = _unsafe(table["unsafe"], file)
    results = _activation_results(table.get("results", {}), file)
    return Table(
        name=name,
        dtype=dtype,
        primitives=tuple(sorted(primitives.items())),
        functions=tuple(functions.items()),
        unsafe=unsafe,
        activation_results=(*(base.activation_results if base else ()), *results),
    )


def _base(extends: Any) -> Table | None:
    if extends is None:
        return None
    if extends not in (*BUILTIN, "base"):
        raise PolicyError(f"extends: there is no policy {extends!r}")
    return read_builtin(extends)


def _entries(group: Any, rule: str, file: str) -> Iterator[tuple[str, str | Function]]:
    with _located(file, rule):
        if not isinstance(group, dict):
            raise PolicyError("must be a table with 'primitives' and 'functions'")
        _check_keys(group, ("primitives", "functions"), rule)
    for kind, names in group.items():
        key = f"{rule}.{kind}"
        for name in _strings(names, file, key):
            with _located(file, key):
                if kind == "primitives":
                    yield key, check_primitive(name)
                else:
                    function = Function(name, required=file not in _BUILTIN_FILES)
                    if "." not in name:
                        raise PolicyError(f"{name!r} is not a dotted name")
                    function.resolve()
                    yield key, function


def _activation_results(group: Any, file: str) -> tuple[Function, ...]:
    with _located(file, "results"):
        if not isinstance(group, dict):
            raise PolicyError("must be a table with 'activation'")
        _check_keys(group, ("activation",), "results")
    names = _strings(group.get("activation", []), file, "results.activation")
    for name in names:
        with _located(file, "results.activation"):
            Function(name).resolve()
    return tuple(Function(name) for name in names)


def _unsafe(groups: Any, file: str) -> tuple[Unsafe, ...]:
    found = []
    with _located(file, "unsafe"):
        if not isinstance(groups, list):
            raise PolicyError("must be a list of tables, each headed [[unsafe]]")
    for group in groups:
        with _located(file, "unsafe"):
            _check_keys(group, _UNSAFE_KEYS, "unsafe")
            for key in _UNSAFE_KEYS:
                if key not in group:
                    raise PolicyError(f"{key!r} is missing")
            primitives = _strings(group["primitives"], file, "unsafe.primitives")
            of = _strings(group["of"], file, "unsafe.of")
            for name in (*primitives, *of):
                if "." in name:
                    Function(name).resolve()
                else:
                    check_primitive(name)
            found.append(
                Unsafe(
                    primitives=primitives,
                    of=of,
                    dtype=to_dtype(group["dtype"]),
                    advice=group["advice"],
                )
            )
    return tuple(found)


def _strings(names: Any, file: str, key: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        with _located(file, key):
            raise PolicyError(f"must be a list of strings, got {names!r}")
    return tuple(names)


def _check_keys(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            inside = f" in [{where}]" if where else ""
            raise PolicyError(
                f"unknown key {key!r}{inside}{hint} (keys are {', '.join(known)})"
            )


@contextmanager
def _located(file: str, key: str = "") -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        message = str(error)
        if message.startswith(file):
            raise
        where = f"{file}: {key}" if key else file
        raise PolicyError(f"{where}: {message}") from error.__cause__
