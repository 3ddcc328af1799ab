"""Decision records: what was decided for each equation, and why.

Reports, errors and tests read these; nothing else derives them again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._dtypes import DType
from jamp._equations import contracted
from jamp._policy.functions import Function
from jamp._policy.rules import Rule
from jamp._tracing.origin import Location, location


class Origin(enum.Enum):
    REGION = "region"
    SCOPE = "scope"
    FUNCTION = "function"
    PRIMITIVE = "primitive"
    DEFAULT = "default"
    OPAQUE = "opaque"
    ELEMENTWISE = "elementwise"
    TABLE = "table"


class Ruling(NamedTuple):
    rule: Rule
    # What gave it: a region with `enabled=False`, an entry of the policy, or, where the
    # policy's entry cannot hold, the equation itself.
    origin: Origin
    entry: str | Function = ""  # pattern of a scope, function, or name of a primitive
    policy: str = ""  # the policy's name

    @property
    def function(self) -> Function | None:
        return self.entry if isinstance(self.entry, Function) else None

    @property
    def label(self) -> str:
        """The entry, for people to read."""
        if self.origin is Origin.SCOPE:
            return f"scope {self.entry!r}"
        return self.entry.name if isinstance(self.entry, Function) else self.entry

    @property
    def source(self) -> str:
        """Where the rule came from, for people to read."""
        if self.origin is Origin.REGION:
            return "region with enabled=False"
        if self.origin is Origin.DEFAULT:
            return f"{self.label} is unknown to {self.policy}"
        if self.origin is Origin.OPAQUE:
            if self.entry in _primitives.MATMULS:
                return "precision asked for in the program"
            return f"{self.label} runs only in the dtypes it was traced in"
        if self.origin is Origin.ELEMENTWISE:
            return f"{self.label} that adds nothing up is elementwise"
        if self.origin is Origin.TABLE:
            return "made of iota and literals alone"
        return f"{self.label} in {self.policy}"


class Conversion(NamedTuple):
    source: DType
    target: DType
    shape: tuple[int, ...]


@dataclass(slots=True)
class Record:
    eqn: JaxprEqn
    ruling: Ruling  # the rule that held, and where it came from
    scope: tuple[str, ...]  # the user's named scopes around it, outermost first
    operands: tuple[Any, ...] = ()  # dtypes of its operands as computed
    results: tuple[Any, ...] = ()  # dtypes of its results, as computed
    returns: tuple[Any, ...] = ()  # in which they leave the listed function around it
    casts: list[Conversion] = field(default_factory=list)  # conversions inserted for it
    caller: JaxprEqn | None = None  # what calls the inner program that holds it

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
    def is_product(self) -> bool:
        """Whether it is a matmul or a convolution, and adds up."""
        elementwise = self.ruling.origin is Origin.ELEMENTWISE
        return self.primitive in _primitives.MATMULS and not elementwise

    @property
    def flops(self) -> float:
        return flops(self.eqn) if self.is_product else 0.0

    @property
    def low(self) -> bool:
        """Whether it computes on 16-bit operands."""
        floats = [d for d in self.operands if d is not None and _dtypes.eligible(d)]
        return bool(floats) and all(d in _dtypes.LOW_DTYPES for d in floats)


@dataclass(slots=True)
class InnerRecords:
    """Records of an inner program, which stands in the outer one as one equation."""

    eqn: JaxprEqn
    entries: list[Record | InnerRecords]


Entry = Record | InnerRecords


def originals(entries: list[Entry]) -> Iterator[Record]:
    """The records themselves; those of inner programs serve every call of them."""
    for entry in entries:
        if isinstance(entry, InnerRecords):
            yield from originals(entry.entries)
        else:
            yield entry


def flops(eqn: JaxprEqn) -> float:
    sizes = [*_dtypes.shape_of(eqn.outvars[0]), *contracted(eqn)]
    known = all(isinstance(size, int) for size in sizes)
    return float(2 * math.prod(sizes)) if known else 0.0
