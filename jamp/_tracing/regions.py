"""Regions: which options are in force where in a traced program.

A region is a named scope, which survives every transformation.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp._compat import name_entries
from jamp._equations.walks import equations
from jamp._tracing.options import Options, options_in_force, refuse_overruled, tracing

# Why what stands beside functions under autocast is computed as written.
OUTSIDE = "outside of autocast"


def scope_names(name_stack: Any) -> tuple[str, ...]:
    """The named scopes of a name stack, outermost first, without transformations.

    Those around a checkpoint JAX names twice backward, the second time behind a "jvp".
    """
    names: list[str] = []
    before: list[str] = []  # those of them that may come once more
    transposed = False
    for is_scope, run in groupby(name_entries(name_stack), itemgetter(0)):
        found = [name for _, name in run]
        if is_scope:
            if before and found[: len(before)] == before:
                del names[-len(before) :]
            names += found
            before = found if transposed else []
        elif "transpose" in found:
            before, transposed = [], True
    return tuple(names)


class _Mark(str):
    """The name of the scope that a region is in a program, which holds its options."""

    options: Options
    of_function: bool  # whether the region is a whole function under autocast


@lru_cache(maxsize=1024)
def _mark(options: Options, of_function: bool) -> _Mark:
    # A policy's own text is its name and how many rules it has.
    rules = [getattr(options.policy, field.name) for field in fields(options.policy)]
    digest = hashlib.sha256(repr([options, rules]).encode()).hexdigest()[:12]
    kind = options.dtype.name if options.enabled else "disabled"
    mark = _Mark(f"jamp.autocast:{kind}:{digest}{':function' if of_function else ''}")
    mark.options, mark.of_function = options, of_function
    return mark


@contextmanager
def region(options: Options, *, of_function: bool = False) -> Iterator[None]:
    """Marks what is traced inside as governed by these options, under autocast."""
    if options_in_force() is None:
        yield
        return
    with tracing(options), jax.named_scope(_mark(options, of_function)):
        yield


@contextmanager
def as_written(source: str) -> Iterator[None]:
    """Marks what is traced inside as computed in the dtypes it is written in."""
    options = options_in_force()
    if options is None:
        yield
        return
    with region(replace(options, enabled=False, source=source)):
        yield


# The attribute of a function with dtypes of its own: why it runs as written under the
# autocast in force, if it does.
REASON = "_jamp_reason"
# The same of the forward rule whose backward rule is being traced.
_forward: ContextVar[Callable[[], str]] = ContextVar("forward", default=str)


@contextmanager
def backward_of(rule: Any, forward: Any) -> Iterator[None]:
    """Has the backward rule that is traced inside know how its forward rule ran.

    Args:
      rule: the forward rule, if it is known.
      forward: its program, which tells of a rule that only calls such functions.
    """
    marks = [next(iter(_marks(eqn)), None) for eqn in forward.eqns]
    whole = marks[0] if marks and len({*marks}) == 1 else None
    disabled = whole is not None and not whole.options.enabled
    source = whole.options.source if whole and disabled else ""
    own = getattr(rule, REASON, str)
    token = _forward.set(lambda: own() or source)
    try:
        yield
    finally:
        _forward.reset(token)


@contextmanager
def as_forward() -> Iterator[None]:
    """Marks a backward rule as computed as its forward rule is."""
    source = _forward.get()()
    with as_written(source) if source else nullcontext():
        yield


def holds_region(program: Any) -> bool:
    """Whether part of a traced program stands in a region."""
    return any(_marks(eqn) for eqn in equations(program))


def _marks(eqn: JaxprEqn) -> list[_Mark]:
    """Of the regions that an equation stands in, as far as its own program tells."""
    names = scope_names(eqn.source_info.name_stack)
    return [name for name in names if isinstance(name, _Mark)]


def options_around(
    function: str, given: Mapping[str, Any], options: Options, program: Any
) -> Options:
    """Options around a program that was traced under them.

    Those that are given hold. Without any it is left as it runs: those of a function
    under autocast are its own, and what stands beside one is computed as written.

    Raises:
      AutocastError: an option that was given holds nowhere.
    """
    found = _under_autocast(program)
    functions = [*filter(None, found)]
    whole = None not in found
    if given and whole:
        refuse_overruled(function, given, options, functions)
    if given or not functions or (whole and len(functions) > 1):
        return options
    if whole:
        return functions[0]
    return replace(options, enabled=False, source=OUTSIDE)


def options_inside(program: Any, options: Options) -> dict[Options, None]:
    """The options in force for a program's operations, in order; outside, some."""
    found = _marks_of_operations(program, (), set())
    return dict.fromkeys(marks[-1].options if marks else options for marks in found)


def _under_autocast(program: Any) -> set[Options | None]:
    """Of operations the options of the function under autocast that they stand in.

    None stands for no region at all; of those in other regions nothing is told.
    """
    found: set[Options | None] = set()
    for marks in _marks_of_operations(program, (), set()):
        functions = [mark.options for mark in marks if mark.of_function]
        enabled = [options for options in functions if options.enabled]
        if enabled or not marks:
            found.add(enabled[-1] if enabled else None)
    return found


def _marks_of_operations(
    program: Any, outer: tuple[_Mark, ...], seen: set[Any]
) -> Iterator[tuple[_Mark, ...]]:
    """The regions that each operation stands in, outermost first.

    What holds programs is none itself, nor are conversions, which are alike anywhere.
    """
    for eqn in program.eqns:
        marks = (*outer, *_marks(eqn))
        held = [*jaxprs_in_params(eqn.params)]
        for inner in held:
            if (id(inner), marks) not in seen:
                seen.add((id(inner), marks))
                yield from _marks_of_operations(inner, marks, seen)
        if not held and eqn.primitive.name != "convert_element_type":
            yield marks


@dataclass(frozen=True)
class Scope:
    names: tuple[str, ...] = ()  # outermost first, without jamp's marks
    region: Options | None = None  # the options of the innermost region

    @property
    def options(self) -> Options:
        assert self.region is not None  # noqa: S101 - its outermost scope has some
        return self.region

    def enter(self, name_stack: Any) -> "Scope":
        return _enter(self, name_stack) if len(name_stack) else self


# The scope of what a checkpoint computes again.
AGAIN = "rematted_computation"


def modules(names: Sequence[str]) -> tuple[str, ...]:
    """The modules among named scopes, outermost first: those that JAX did not open."""
    # JAX names a checkpoint that it expands; of einsum, a scope is its subscripts.
    return tuple(n for n in names if n != "checkpoint" and "->" not in n)


@lru_cache(maxsize=1024)
def _enter(outer: Scope, name_stack: Any) -> Scope:
    names, inside = list(outer.names), outer.region
    for name in scope_names(name_stack):
        if isinstance(name, _Mark):
            inside = name.options
        elif name != AGAIN:
            names.extend(name.split("/"))
    return Scope(tuple(names), inside)
