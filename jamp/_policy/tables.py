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

from jamp._dtypes import FLOAT32, DType
from jamp._errors import PolicyError
from jamp._policy.functions import Function
from jamp._policy.rules import (
    BUILTIN,
    RULE_NAMES,
    Rule,
    Unsafe,
    check_primitive,
    to_dtype,
)

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
    return _parse(text, str(path), path.stem)


@cache
def read_builtin(name: str) -> Table:
    """Reads a table that comes with jamp."""
    resource = files("jamp.policies").joinpath(f"{name}.toml")
    text = resource.read_text(encoding="utf-8")
    return _parse(text, resource.name, name, builtin=True)


_EMPTY = Table("", FLOAT32, (), (), (), ())


def _parse(text: str, file: str, stem: str, builtin: bool = False) -> Table:
    with _inside(file):
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PolicyError(f"not valid TOML: {error}") from error
        _check_keys(table, _TOP_KEYS)
        extends = table.get("extends")
        if extends not in (None, "base", *BUILTIN):
            raise PolicyError(f"extends: there is no policy {extends!r}")
        base = _EMPTY if extends is None else read_builtin(extends)
        rules = _rules(table, builtin)
        dtype = base.dtype
        if extends is None or "dtype" in table:
            with _inside("dtype"):
                dtype = to_dtype(table.get("dtype"))
        name = table.get("name", stem)
        if not isinstance(name, str):
            raise PolicyError(f"name: must be a string, got {name!r}")
        own = {entry: rule for entry, rule in rules.items() if isinstance(entry, str)}
        functions = {e: rule for e, rule in rules.items() if isinstance(e, Function)}
        return Table(
            name=name,
            dtype=dtype,
            primitives=tuple(sorted({**dict(base.primitives), **own}.items())),
            functions=tuple({**dict(base.functions), **functions}.items()),
            unsafe=_unsafe(table["unsafe"]) if "unsafe" in table else base.unsafe,
            activation_results=(
                *base.activation_results,
                *_activation_results(table.get("results", {})),
            ),
        )


def _rules(table: dict[str, Any], builtin: bool) -> dict[str | Function, Rule]:
    found: dict[str | Function, Rule] = {}
    listed: dict[str | Function, str] = {}
    for rule in Rule:
        group = table.get(rule.value, {})
        with _inside(rule.value):
            if not isinstance(group, dict):
                raise PolicyError("must be a table with 'primitives' and 'functions'")
            _check_keys(group, ("primitives", "functions"), rule.value)
        for kind, names in group.items():
            key = f"{rule.value}.{kind}"
            with _inside(key):
                for name in _strings(names):
                    entry = _entry(name, kind, builtin)
                    if entry in listed:
                        raise PolicyError(
                            f"{name!r} is listed under {listed[entry]} too"
                        )
                    found[entry], listed[entry] = rule, key
    return found


def _entry(name: str, kind: str, builtin: bool) -> str | Function:
    if kind == "primitives":
        return check_primitive(name)
    if "." not in name:
        raise PolicyError(f"{name!r} is not a dotted name")
    return _function(name, required=not builtin)


def _function(name: str, required: bool = True) -> Function:
    """The function of a dotted name, which has to exist if its module is imported."""
    function = Function(name, required=required)
    function.resolve()
    return function


def _activation_results(group: Any) -> tuple[Function, ...]:
    with _inside("results"):
        if not isinstance(group, dict):
            raise PolicyError("must be a table with 'activation'")
        _check_keys(group, ("activation",), "results")
    with _inside("results.activation"):
        return tuple(map(_function, _strings(group.get("activation", []))))


def _unsafe(groups: Any) -> tuple[Unsafe, ...]:
    with _inside("unsafe"):
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise PolicyError("must be a list of tables, each headed [[unsafe]]")
        for group in groups:
            _check_keys(group, _UNSAFE_KEYS, "unsafe")
            for key in _UNSAFE_KEYS:
                if key not in group:
                    raise PolicyError(f"{key!r} is missing")
    return tuple(map(_one_unsafe, groups))


def _one_unsafe(group: dict[str, Any]) -> Unsafe:
    names: dict[str, tuple[str, ...]] = {}
    for key in ("primitives", "of"):
        with _inside(f"unsafe.{key}"):
            names[key] = _strings(group[key])
    with _inside("unsafe"):
        for name in (*names["primitives"], *names["of"]):
            _entry(name, "functions" if "." in name else "primitives", builtin=False)
        return Unsafe(**names, dtype=to_dtype(group["dtype"]), advice=group["advice"])


def _strings(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise PolicyError(f"must be a list of strings, got {names!r}")
    return tuple(names)


def _check_keys(
    table: dict[str, Any], known: tuple[str, ...], within: str = ""
) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            inside = f" in [{within}]" if within else ""
            raise PolicyError(
                f"unknown key {key!r}{inside}{hint} (keys are {', '.join(known)})"
            )


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Puts the name of a file or key before the message of an error."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{name}: {error}") from error.__cause__
