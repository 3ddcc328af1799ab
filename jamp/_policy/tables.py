"""Reads and validates policy tables."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from jamp._dtypes import LOW_DTYPES, DType
from jamp._errors import PolicyError, did_you_mean
from jamp._policy.functions import Function
from jamp._policy.rules import BUILTIN, RULE_NAMES, Rule, Unsafe, check_primitive

_TOP_KEYS = (
    *("name", "dtype", "extends", "unsafe", "results", "float32_gradients"),
    *RULE_NAMES,
)
_UNSAFE_KEYS = ("primitives", "of", "dtype", "advice")
_PLAIN = (("name", str, "a string"), ("float32_gradients", bool, "true or false"))
# What a table that extends none begins with, by the attributes of `jamp.Policy`.
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("primitives", "functions", "unsafe", "activation_results"), ()),
    "float32_gradients": True,
}


def read_file(source: str | Path) -> dict[str, Any]:
    """The attributes of a policy in a TOML file; see `Policy.load`."""
    try:
        path = Path(source)
        text = path.read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        named = isinstance(source, str | PathLike)
        got = f"{str(source)!r}" if named else f"from a {type(source).__name__}"
        raise PolicyError(
            f"cannot read policy {got}: give one of {', '.join(BUILTIN)} or "
            f"the path of a TOML file ({error}){did_you_mean(source, BUILTIN)}"
        ) from error
    return _parse(text, str(path), path.stem)


@cache
def read_builtin(name: str) -> dict[str, Any]:
    resource = files("jamp.policies").joinpath(f"{name}.toml")
    text = resource.read_text(encoding="utf-8")
    return _parse(text, resource.name, name, builtin=True)


def _parse(text: str, file: str, stem: str, builtin: bool = False) -> dict[str, Any]:
    with _inside(file):
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"not valid TOML: {error}") from error
        _check_keys(table, _TOP_KEYS)
        extends = table.get("extends")
        if extends not in (None, "base", *BUILTIN):
            raise PolicyError(
                f"extends: there is no policy {extends!r}"
                f"{did_you_mean(extends, BUILTIN)} (there are base, "
                f"{', '.join(BUILTIN)})"
            )
        found = dict(_NOTHING if extends is None else read_builtin(extends))
        for kind, rules in _rules(table, file, builtin).items():
            anew = set(map(_name_of, rules))
            kept = [pair for pair in found[kind] if _name_of(pair[0]) not in anew]
            found[kind] = (*kept, *rules.items())
        found["primitives"] = tuple(sorted(found["primitives"]))
        if extends is None or "dtype" in table:
            if "dtype" not in table:
                raise PolicyError('dtype is missing; or begin with extends = "gpu"')
            with _inside("dtype"):
                found["dtype"] = _dtype(table["dtype"])
        found["name"] = stem
        for key, wanted, words in _PLAIN:
            found[key] = table.get(key, found[key])
            if not isinstance(found[key], wanted):
                raise PolicyError(f"{key}: must be {words}, got {found[key]!r}")
        if "unsafe" in table:
            found["unsafe"] = tuple(_unsafe(table["unsafe"]))
            _check_rules_of(found)
        results = _group(table, "results", ("activation",)).get("activation", [])
        with _inside("results.activation"):
            where = f"{file}: results.activation"
            names = [_entry(name, "functions", where) for name in _strings(results)]
            found["activation_results"] += tuple(names)
        return found


def _rules(
    table: dict[str, Any], file: str, builtin: bool
) -> dict[str, dict[Any, Rule]]:
    found: dict[str, dict[Any, Rule]] = {"primitives": {}, "functions": {}}
    listed: dict[str, str] = {}
    for rule in Rule:
        own_code = builtin and rule is Rule.LOWER
        for kind, names in _group(table, rule.value, (*found, "elementwise")).items():
            rules = found["functions" if kind == "elementwise" else kind]
            key = f"{rule.value}.{kind}"
            with _inside(key):
                for name in _strings(names):
                    entry = _entry(name, kind, f"{file}: {key}", not builtin, own_code)
                    if name in listed:
                        raise PolicyError(
                            f"{name!r} is listed under {listed[name]} too"
                        )
                    listed[name] = key
                    rules[entry] = rule
    return found


def _name_of(entry: str | Function) -> str:
    return entry if isinstance(entry, str) else entry.name


def _entry(
    name: str,
    kind: str,
    where: str = "",
    required: bool = True,
    own_code: bool = False,
) -> str | Function:
    """A primitive, or a function, which has to exist if its module is imported."""
    if kind == "primitives":
        return check_primitive(name)
    if "." not in name:
        raise PolicyError(f"{name!r} is not a dotted name")
    function = Function(name, None, required, kind == "elementwise", own_code)
    function.resolve()
    return replace(function, where=where)


def _unsafe(groups: Any) -> Iterator[Unsafe]:
    with _inside("unsafe"):
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise PolicyError("must be a list of tables, each headed [[unsafe]]")
        for group in groups:
            _check_keys(group, _UNSAFE_KEYS, "unsafe")
            for key in _UNSAFE_KEYS:
                if key not in group:
                    raise PolicyError(f"{key!r} is missing")
    for group in groups:
        names: dict[str, tuple[str, ...]] = {}
        for key in ("primitives", "of"):
            with _inside(f"unsafe.{key}"):
                names[key] = _strings(group[key])
        with _inside("unsafe"):
            for name in (*names["primitives"], *names["of"]):
                _entry(name, "functions" if "." in name else "primitives")
            advice = group["advice"]
            if not isinstance(advice, str):
                raise PolicyError(f"advice must be a string, got {advice!r}")
            yield Unsafe(**names, dtype=_dtype(group["dtype"]), advice=advice)


def _check_rules_of(found: dict[str, Any]) -> None:
    """Raises for an unsafe function that has no rule: its calls are not looked for."""
    ruled = {function.identity for function, _ in found["functions"]}
    for unsafe in found["unsafe"]:
        for name in unsafe.of:
            if "." in name and Function(name, required=False).identity not in ruled:
                raise PolicyError(
                    f"unsafe.of: {name!r} has no rule: list it, as under promote"
                )


def _dtype(value: Any) -> DType:
    for dtype in LOW_DTYPES:
        if value == dtype.name:
            return dtype
    known = [dtype.name for dtype in LOW_DTYPES]
    names, hint = " or ".join(map(repr, known)), did_you_mean(value, known)
    raise PolicyError(f"dtype must be {names}, got {value!r}{hint}")


def _group(table: dict[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """A table in a table, whose keys have to be known ones."""
    group = table.get(name, {})
    with _inside(name):
        if not isinstance(group, dict):
            keys = " and ".join(map(repr, known))
            raise PolicyError(f"must be a table with {keys}")
        _check_keys(group, known, name)
    return group


def _strings(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise PolicyError(f"must be a list of strings, got {names!r}")
    return tuple(names)


def _check_keys(
    table: dict[str, Any], known: tuple[str, ...], within: str = ""
) -> None:
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known)
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
