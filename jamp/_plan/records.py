"""Decision records: what was decided for each equation, and why.

Reports, errors and tests read these, and nothing derives them again. Passes over a
plan, and the emitter, ask them for rules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._dtypes import DType
from jamp._equations.walks import adds_up_groups, contracted
from jamp._plan.products import adds_nothing
from jamp._policy.functions import Function
from jamp._policy.policy import Policy
from jamp._policy.rules import Rule
from jamp._tracing.locations import Location, location


class Origin(enum.Enum):
    """What gave an equation its rule."""

    REGION = "region"
    SCOPE = "scope"
    FUNCTION = "function"
    PRIMITIVE = "primitive"
    DEFAULT = "default"
    OPAQUE = "opaque"
    PRECISION = "precision"
    ELEMENTWISE = "elementwise"
    TABLE = "table"
    INTEGERS = "integers"
    IDENTITY = "identity"


class Ruling(NamedTuple):
    rule: Rule
    # What gave it: a region with `enabled=False`, an entry of the policy, or, where the
    # policy's entry cannot hold, the equation itself.
    origin: Origin
    # What made the region, pattern of a scope, function, or name of a primitive.
    entry: str | Function = ""
    policy: Policy | None = None  # that of the entry

    @property
    def function(self) -> Function | None:
        return self.entry if isinstance(self.entry, Function) else None

    @property
    def for_equations(self) -> Ruling:
        """What settles the equations of a function that it is for."""
        inside = self.rule is Rule.INTERNAL_FLOAT32
        return self._replace(rule=Rule.FLOAT32) if inside else self

    @property
    def label(self) -> str:
        """The entry, for people to read."""
        if self.origin is Origin.SCOPE:
            return f"scope {self.entry!r}"
        return self.entry.name if isinstance(self.entry, Function) else self.entry

    @property
    def source(self) -> str:
        """Where the rule came from, for people to read."""
        words = _SOURCES.get(self.origin, "{0.label} in {0.policy.name}")
        return words.format(self)


_SOURCES = {
    Origin.REGION: "{0.label}",
    Origin.DEFAULT: "{0.label} is unknown to {0.policy.name}",
    Origin.OPAQUE: "{0.label} runs only in the dtypes it was traced in",
    Origin.PRECISION: "precision asked for in the program",
    Origin.ELEMENTWISE: "{0.label} that adds nothing up is elementwise",
    Origin.TABLE: "made of iota and literals alone",
    Origin.INTEGERS: "{0.label} of integers that 16 bits would round",
    Origin.IDENTITY: "{0.label} that rounds nothing",
}


class Conversion(NamedTuple):
    source: DType
    target: DType
    shape: tuple[int, ...]


class Returned(NamedTuple):
    """A result that is handed on: to the caller, or out of a listed function."""

    number: int  # that of the value
    dtypes: tuple[Any, ...]  # those in which it is read


class Note(NamedTuple):
    """Why an operation computes in float32 although 16 bits came in, or returns it."""

    words: str
    readers: tuple[str, ...] = ()  # their names, where these are known

    def __str__(self) -> str:
        by = f" by {', '.join(self.readers)}" if self.readers else ""
        return f"{self.words}{by}"


@dataclass(slots=True)
class Record:
    """What was decided for an equation."""

    eqn: JaxprEqn
    ruling: Ruling  # the rule that held, and where it came from
    scope: tuple[str, ...]  # the user's named scopes around it, outermost first
    operands: tuple[Any, ...] = ()  # dtypes of its operands as computed
    results: tuple[Any, ...] = ()  # dtypes of its results, as computed
    # Those of its results that are handed on; None for one that stays in its function.
    returns: tuple[Returned | None, ...] = ()
    note: Note | None = None  # why float32, where its rule does not say it
    casts: list[Conversion] = field(default_factory=list)  # conversions inserted for it
    # Records of the programs that it holds; one that is called often has them once.
    inner: list[list[Record]] = field(default_factory=list)
    caller: JaxprEqn | None = None  # what calls the inner program that holds it
    unsafe: str = ""  # why it is banned, if what it reads is really rounded

    @property
    def primitive(self) -> str:
        return self.eqn.primitive.name

    @property
    def location(self) -> Location | None:
        found = location(self.eqn)
        if found is None and self.caller is not None:
            return location(self.caller)
        return found

    @property
    def entry(self) -> str:
        """The listed function that it is part of, or the primitive."""
        function = self.ruling.function
        return function.name if function else self.primitive

    @property
    def returned(self) -> tuple[Any, ...]:
        """The dtypes in which its results are handed on, or else are computed."""
        found = [dtype for result in self.returns if result for dtype in result.dtypes]
        return tuple(dict.fromkeys(found or self.results))

    @property
    def is_product(self) -> bool:
        """Whether it is a matmul or a convolution, and adds up."""
        matmul = self.primitive in _primitives.PRODUCTS
        return matmul and not adds_nothing(self.eqn)

    @property
    def flops(self) -> float:
        if not self.is_product:
            return 0.0
        shape = _dtypes.shape_of(self.eqn.outvars[0])
        if adds_up_groups(self.eqn):
            # All groups together have the rows; they are the result's first dimension.
            shape = shape[1:]
        return 2.0 * _dtypes.known_size([*shape, *contracted(self.eqn)])

    @property
    def computes_low(self) -> bool:
        """Whether it computes on 16-bit operands."""
        floats = [d for d in self.operands if d is not None and _dtypes.eligible(d)]
        return bool(floats) and all(d in _dtypes.LOW_DTYPES for d in floats)


def with_inner(records: Iterable[Record]) -> Iterator[Record]:
    """Some records, each followed by those of the programs that it holds, once."""
    entered: set[int] = set()

    def walk(records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            yield record
            for inner in record.inner:
                if id(inner) not in entered:
                    entered.add(id(inner))
                    yield from walk(inner)

    return walk(records)
