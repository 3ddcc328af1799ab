"""Policies: which rule holds for which primitive, function and scope."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from jamp._dtypes import LOW_DTYPES, LOW_NAMES, DType
from jamp._errors import JampWarning, PolicyError
from jamp._policy.functions import Function
from jamp._policy.rules import DEVICES, Rule, Unsafe, check_primitive, to_rule
from jamp._policy.tables import read_builtin, read_file


@dataclass(frozen=True)
class Policy:
    """A set of rules: data, hashable and comparable.

    Build one with `Policy.load`, then derive others with `with_rules` and `scoped`.

    Attributes:
      name: what reports call it.
      dtype: the 16-bit dtype that `jamp.autocast` uses unless told otherwise.
      primitives: (primitive name, rule) pairs.
      functions: (function, rule) pairs.
      scopes: (pattern, rule) pairs; the last that matches wins.
      unsafe: combinations of operations that raise.
      activation_results: functions under `internal_float32` whose results have the
        dtype that came in, also where the program as traced returns another.
      float32_gradients: whether matmuls give the gradients of float32 weights in
        float32, and devices add them up so. Else they are rounded to 16 bits first.
    """

    name: str
    dtype: DType
    primitives: tuple[tuple[str, Rule], ...] = ()
    functions: tuple[tuple[Function, Rule], ...] = ()
    scopes: tuple[tuple[str, Rule], ...] = ()
    unsafe: tuple[Unsafe, ...] = ()
    activation_results: tuple[Function, ...] = ()
    float32_gradients: bool = True

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype not in LOW_DTYPES:
            raise PolicyError(
                f"the dtype of a policy must be {LOW_NAMES}, got {self.dtype!r}"
            )
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(self.float32_gradients, bool):
            raise PolicyError(
                "float32_gradients must be True or False, got "
                f"{self.float32_gradients!r}"
            )
        for name, (what, fits) in _FIELDS.items():
            given = getattr(self, name)
            for entry in given if isinstance(given, tuple) else (given,):
                if not fits(entry):
                    raise PolicyError(
                        f"{name} must be a tuple of {what}, got {entry!r}; load, "
                        "with_rules and scoped take names"
                    )
        for primitive, _ in self.primitives:
            check_primitive(primitive)

    @classmethod
    def load(cls, source: str | Path) -> Policy:
        """Loads a policy table.

        Args:
          source: `'gpu'` (or `'cuda'`, `'rocm'`), `'cpu'` or `'tpu'`, or the path of a
            TOML file.

        Returns:
          The policy.

        Raises:
          PolicyError: the file cannot be read, has an unknown key, rule or primitive,
            or a function that its module, which is imported, lacks. The message names
            the file and the key. Names of modules that are imported later are looked
            up, and raise, when a function is traced after that.

        Warns:
          JampWarning: a function's package is not installed.
        """
        if str(source) in DEVICES:
            return _builtin(DEVICES[str(source)])
        policy = cls(**read_file(source))
        given = (*dict(policy.functions), *policy.activation_results)
        for function in given:
            if function.required and function.lacks_package:
                warnings.warn(
                    f"{function.where}: {function.name!r} is of a package that is not "
                    "installed, so the entry decides about nothing: correct the name, "
                    "or install the package",
                    JampWarning,
                    stacklevel=2,
                )
        return policy

    def with_rules(self, **rules: Iterable[Any]) -> Policy:
        """Returns a policy in which the given entries have new rules.

        Args:
          **rules: for each rule (`lower`, `float32`, `internal_float32`, `promote`,
            `as_traced`, `banned`) a list of primitives, function objects, or names: a
            dotted name is a function, one without a dot a primitive.

        Raises:
          PolicyError: an unknown rule or primitive, a function that its module, which
            is imported, lacks, one of a package that is not installed, or one entry
            given twice. A name of a module that is imported later is looked up, and
            raises, when a function is traced after that.
        """
        given: dict[Any, tuple[str | Function, Rule]] = {}
        for name, entries in rules.items():
            rule = to_rule(name)
            if isinstance(entries, str) or not isinstance(entries, Iterable):
                raise PolicyError(f"{name}={entries!r}: give a list of entries")
            for entry in entries:
                key = self._entry(entry)
                same = _identity(key)
                if given.get(same, (key, rule))[1] is not rule:
                    label = key if isinstance(key, str) else key.name
                    raise PolicyError(f"{label} is given two rules")
                given[same] = key, rule
        primitives = dict(self.primitives)
        functions = {f: r for f, r in self.functions if _identity(f) not in given}
        for key, rule in given.values():
            table: dict[Any, Rule] = primitives if isinstance(key, str) else functions
            table[key] = rule
        return replace(
            self,
            name=_derived(self.name),
            primitives=tuple(sorted(primitives.items())),
            functions=tuple(functions.items()),
        )

    def scoped(self, pattern: str, rule: str) -> Policy:
        """Returns a policy with a rule for every operation in some named scopes.

        Args:
          pattern: a pattern over the name stack, which Flax fills with module paths:
            `*` stands for any part of one name, `**` for any number of names, as in
            `'**/lm_head'` or `'encoder/block_*/attention'`. What lies inside a scope
            that matches has the rule too.
          rule: the name of a rule.

        Raises:
          PolicyError: an unknown rule, or a pattern that is no string.
        """
        if not pattern or not isinstance(pattern, str):
            raise PolicyError(f"a scope pattern is a non-empty string, got {pattern!r}")
        return replace(
            self,
            name=_derived(self.name),
            scopes=(*self.scopes, (pattern, to_rule(rule))),
        )

    def rule(
        self,
        primitive: str | Primitive | None = None,
        *,
        function: Any = None,
        scope: str | tuple[str, ...] = (),
    ) -> Rule | None:
        """The rule that this policy gives to an operation.

        Args:
          primitive: a primitive or its name.
          function: the function, or its dotted name, in which it stands.
          scope: the scopes in which it stands, outermost first, or joined by `/`.

        Returns:
          The rule of the scope, else of the function, else of the primitive, or None
          if the policy knows none of them.

        Raises:
          PolicyError: a name that is no primitive, or a function without its keyword.
        """
        name = None if primitive is None else self._entry(primitive)
        if isinstance(name, Function):
            raise PolicyError(
                f"{name.name} is a function, not a primitive: ask rule(function=...)"
            )
        names = tuple(scope.split("/") if isinstance(scope, str) else scope)
        found = self._matching(names)
        if found:
            return found[-1][1]
        if function is not None:
            key = self._entry(function)
            code = key.resolve() if isinstance(key, Function) else None
            # Of two names of one function, the later decides.
            for own, listed in reversed(self.function_codes):
                if own is code:
                    return self.function_rules[listed]
        return self.primitive_rules.get(name) if name else None

    def scope_rule(self, names: tuple[str, ...]) -> tuple[str, Rule] | None:
        """The last (pattern, rule) that matches the scopes of an operation, if any."""
        found = self._matching(names)
        self.unmatched.difference_update(pattern for pattern, _ in found)
        return found[-1] if found else None

    def _matching(self, names: tuple[str, ...]) -> list[tuple[str, Rule]]:
        return [(p, rule) for p, rule in self.scopes if _matches(p, names)]

    @property
    def unmatched(self) -> set[str]:
        """Patterns that matched no scope yet, before the first trace has ended."""
        return _unmatched(self.scopes)

    @cached_property
    def primitive_rules(self) -> Mapping[str, Rule]:
        return dict(self.primitives)

    @cached_property
    def function_rules(self) -> Mapping[Function, Rule]:
        return dict(self.functions)

    @property
    def function_codes(self) -> list[tuple[CodeType, Function]]:
        """The functions whose modules are imported by now, with their code objects."""
        codes = ((function.resolve(), function) for function, _ in self.functions)
        return [(code, function) for code, function in codes if code is not None]

    def returns_activation(self, function: Function) -> bool:
        """Whether a function gives the dtype that came in, whatever it says itself."""
        own = function.identity
        return any(listed.identity == own for listed in self.activation_results)

    def names_of_unsafe(self, function: Function) -> frozenset[str]:
        """The names by which `unsafe` knows a function, if it does."""
        names = {name for unsafe in self.unsafe for name in unsafe.of if "." in name}
        own = function.identity if names else None
        return frozenset(
            name for name in names if Function(name, required=False).identity == own
        )

    def _entry(self, entry: Any) -> str | Function:
        if isinstance(entry, Primitive):
            return entry.name
        if isinstance(entry, Function):
            return entry
        if not isinstance(entry, str):
            return Function.of(entry)
        if "." in entry:
            function = Function(entry)
            if function.lacks_package:
                package = entry.partition(".")[0]
                raise PolicyError(
                    f"{entry!r} is of a package {package!r}, which is not installed: "
                    "give the whole name, as 'jax.numpy.interp', or the function itself"
                )
            return function
        try:
            return check_primitive(entry)
        except PolicyError as error:
            names = [f.name for f, _ in self.functions if f.name.endswith(f".{entry}")]
            raise PolicyError(
                f"{error} (functions have dotted names, as in "
                f"{' or '.join(names) or 'jax.nn.softmax'})"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        # Without what is cached: hashes differ between processes.
        return {found.name: getattr(self, found.name) for found in fields(self)}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.name, self.dtype, self.primitives, self.functions, self.scopes)
        )

    def __repr__(self) -> str:
        count = len(self.primitives) + len(self.functions) + len(self.scopes)
        return f"<Policy {self.name}, dtype {self.dtype.name}, {count} rules>"

    def __str__(self) -> str:
        sections = [f"policy {self.name}, dtype {self.dtype.name}"]
        rules = named_rules(self)
        for rule in Rule:
            names = sorted(name for name, given in rules.items() if given is rule)
            if names:
                title = f"{rule.value} ({len(names)})"
                sections.append("\n  ".join([title, *names]))
        if self.activation_results:
            names = sorted(function.name for function in self.activation_results)
            title = f"results in the dtype that came in ({len(names)})"
            sections.append("\n  ".join([title, *names]))
        if not self.float32_gradients:
            sections.append("gradients of weights in 16 bits")
        for unsafe in self.unsafe:
            reads = f"{', '.join(unsafe.primitives)} of {', '.join(unsafe.of)}"
            sections.append(f"unsafe in {unsafe.dtype.name}\n  {reads}")
        return "\n\n".join(sections)


def _pair_of(kind: type) -> Callable[[Any], bool]:
    def fits(pair: Any) -> bool:
        if not isinstance(pair, tuple) or len(pair) != 2:
            return False
        return isinstance(pair[0], kind) and isinstance(pair[1], Rule)

    return fits


# What the tuples of a policy hold, in words, and whether something is that.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "primitives": ("pairs of a name and a rule", _pair_of(str)),
    "functions": ("pairs of a function of a policy and a rule", _pair_of(Function)),
    "scopes": ("pairs of a pattern and a rule", _pair_of(str)),
    "unsafe": ("those of a loaded policy", lambda e: isinstance(e, Unsafe)),
    "activation_results": (
        "functions of a policy",
        lambda entry: isinstance(entry, Function),
    ),
}


def entries(policy: Policy) -> Iterator[tuple[str, str, Rule]]:
    for name, rule in policy.primitives:
        yield "primitive", name, rule
    for function, rule in policy.functions:
        yield "function", function.name, rule
    for pattern, rule in policy.scopes:
        yield "scope", pattern, rule


def named_rules(policy: Policy) -> dict[str, Rule]:
    """The rule of every entry, by the name that a reader knows it by."""
    return {
        f"scope {name!r}" if kind == "scope" else name: rule
        for kind, name, rule in entries(policy)
    }


# One object for each device, so that what a policy caches about itself is kept.
@cache
def _builtin(name: str) -> Policy:
    return Policy(**read_builtin(name))


def _identity(key: str | Function) -> Any:
    """What two names of one function have in common."""
    return key if isinstance(key, str) else key.identity


def _derived(name: str) -> str:
    return name if name.endswith("*") else f"{name}*"


# By content: what a trace names as its policy may be another one that is equal.
@lru_cache(maxsize=1024)
def _unmatched(scopes: tuple[tuple[str, Rule], ...]) -> set[str]:
    return {pattern for pattern, _ in scopes}


@lru_cache(maxsize=4096)
def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    """Whether the pattern of a scope matches these names, or those around them."""
    regex = end = ""
    for part in pattern.split("/"):
        if part == "**":
            # Atomic, as `*` is: the first place where what follows fits is enough.
            regex, end = f"{regex}{end}(?>(?:[^/]*/)*?", ")"
        else:
            first, *pieces = map(re.escape, f"{part}/".split("*"))
            regex += "".join([first, *(f"(?>[^/]*?{piece})" for piece in pieces)])
    return re.match(regex + end, "".join(f"{name}/" for name in names)) is not None
