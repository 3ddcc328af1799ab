"""The operations of a report, what is counted of them, and what needs attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from string import digits
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp import _dtypes, _primitives
from jamp._explain.residuals import Residuals, elements
from jamp._plan.records import Entry, Origin, Record
from jamp._plan.rules import STRUCTURAL
from jamp._policy.policy import Policy, entries
from jamp._policy.rules import BUILTIN, Rule
from jamp._tracing.origin import Location, library_location, location, stem_of
from jamp._tracing.regions import Options, Scope

# What calls programs, which count in its place.
_CALLS = STRUCTURAL.keys() - _primitives.COLLECTIVES
_LOW = frozenset(dtype.name for dtype in _dtypes.LOW_DTYPES)


@dataclass(frozen=True)
class Operation:
    record: Record  # what was decided for it
    times: int = 1  # the product of the lengths of the scans that it stands in

    @cached_property
    def location(self) -> Location | None:
        return self.record.location

    @cached_property
    def library(self) -> Location | None:
        """The line of a library, such as Flax, that the user's line led to."""
        record = self.record
        found = library_location(record.eqn, record.ruling.function)
        if found is None and record.caller and location(record.eqn) is None:
            return library_location(record.caller, record.ruling.function)
        return found

    @cached_property
    def scope(self) -> tuple[str, ...]:
        """The modules that it stands in; of einsum, a scope is its subscripts."""
        return tuple(name for name in self.record.scope if "->" not in name)

    @cached_property
    def path(self) -> tuple[str, ...]:
        """The modules that it stands in, or the user's function if in none."""
        if self.scope or self.location is None:
            return self.scope
        return (f"{self.location.function}()",)

    @property
    def function(self) -> str | None:
        """The listed function that it is part of, if it is."""
        function = self.record.ruling.function
        return function.name if function else None

    @property
    def entry(self) -> str:
        return self.function or self.record.primitive

    @property
    def matmul(self) -> bool:
        return self.record.is_product

    @property
    def shapes(self) -> tuple[tuple[object, ...], ...]:
        """Of a matmul's operands, or else of the results, but for scalars."""
        eqn = self.record.eqn
        found = map(_dtypes.shape_of, eqn.invars if self.matmul else eqn.outvars)
        return tuple(filter(None, found))

    @property
    def decided(self) -> bool:
        """Whether anything was: not of a call that casts nothing and is not listed."""
        record = self.record
        call = record.primitive in _CALLS and not record.casts
        return not call or self.function is not None

    @property
    def uncast(self) -> str | None:
        """The dtype that keeps a matmul from its rule, as complex numbers do."""
        if self.record.ruling.rule is not Rule.LOWER or not self.matmul:
            return None
        uncast = (d for d in self.record.operands[:2] if not _dtypes.eligible(d))
        return next(map(str, uncast), None)

    @property
    def reason(self) -> str:
        """Where its rule comes from, or why the rule changes nothing."""
        if self.uncast is not None:
            return f"{self.uncast} is not cast"
        return self.record.ruling.source

    @property
    def flops(self) -> float:
        """Floating-point operations, of matmuls and convolutions only."""
        return self.record.flops * self.times

    @cached_property
    def result_bytes(self) -> Counter[str]:
        """Bytes of its results by dtype; none of a call, whose program counts."""
        found: Counter[str] = Counter()
        name = self.record.primitive
        if name in _CALLS or name == "convert_element_type":
            return found
        results = zip(self.record.eqn.outvars, self.record.results, strict=True)
        for var, dtype in results:
            if hasattr(dtype, "itemsize"):
                size = elements(_dtypes.shape_of(var))
                found[str(dtype)] += size * dtype.itemsize * self.times
        return found

    @property
    def cast_bytes(self) -> int:
        """Bytes that the conversions inserted for it read and write."""
        return self.times * sum(
            elements(cast.shape) * (cast.source.itemsize + cast.target.itemsize)
            for cast in self.record.casts
        )


@dataclass(frozen=True)
class Counted:
    """Operations, and what is counted of them.

    Counted is the program as JAX traces it, before XLA fuses operations. What stands in
    a scan counts once for each iteration, and in a `shard_map` once for each device;
    the body of a while loop counts once, because nothing tells how often it runs, and
    of a conditional every branch counts. That holds for all figures, for the numbers of
    matmuls and casts as for FLOPs and bytes; only `operations` has an equation once,
    with how often it runs. The insides of what autocast leaves alone,
    such as Pallas kernels, do not count.
    """

    operations: tuple[Operation, ...]  # the equations, those of inner programs included

    @property
    def matmuls(self) -> tuple[Operation, ...]:
        """The matmuls and convolutions."""
        return tuple(op for op in self.operations if op.matmul)

    @property
    def low_matmuls(self) -> int:
        """How many of them compute on 16-bit operands."""
        return runs(op for op in self.matmuls if op.record.low)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of all matmuls and convolutions."""
        return sum(op.flops for op in self.operations)

    @cached_property
    def low_flop_share(self) -> float:
        """Share, from 0 to 1, of those operations that run on 16-bit operands."""
        low = sum(op.flops for op in self.operations if op.record.low)
        return low / self.flops if self.flops else 0.0

    @cached_property
    def result_bytes(self) -> dict[str, int]:
        """Bytes of the results of all operations but conversions, by dtype.

        A result that is rounded counts in the dtype in which it is handed on.
        """
        total: Counter[str] = Counter()
        for op in self.operations:
            total.update(op.result_bytes)
        return dict(sorted(total.items()))

    @property
    def low_byte_share(self) -> float:
        """Share, from 0 to 1, of those bytes that are of 16-bit floats."""
        total = sum(self.result_bytes.values())
        low = sum(size for name, size in self.result_bytes.items() if name in _LOW)
        return low / total if total else 0.0

    @property
    def casts(self) -> int:
        """Number of conversions that autocast inserted into the program."""
        return sum(op.times * len(op.record.casts) for op in self.operations)

    @cached_property
    def cast_bytes(self) -> int:
        """Bytes that these conversions read and write, where XLA fuses none away."""
        return sum(op.cast_bytes for op in self.operations)


def runs(operations: Iterable[Operation]) -> int:
    return sum(op.times for op in operations)


@dataclass(frozen=True)
class Module(Counted):
    """A module of the program with all that stands in it, or several that are alike."""

    paths: frozenset[tuple[str, ...]]  # of each, of those around it that are alike too
    names: tuple[str, ...]  # the last part of their paths
    own: tuple[Operation, ...]  # the operations that stand in none of its children
    children: tuple[Module, ...]  # the modules inside

    @property
    def name(self) -> str:
        again = f", the same {len(self.names)} times" if len(self.names) > 1 else ""
        return spans(self.names) + again


def module_of(
    names: tuple[str, ...], operations: tuple[Operation, ...], depth: int = 0
) -> Module:
    """A module of operations; the first `depth` parts of their paths lead to it.

    Modules inside it are alike if their names differ by a number, and what they hold
    stands on the same lines, and makes arrays of the same shapes.
    """
    own: list[Operation] = []
    below: dict[str, list[Operation]] = {}
    for op in operations:
        if len(op.path) > depth:
            below.setdefault(op.path[depth], []).append(op)
        else:
            own.append(op)
    alike: dict[tuple[str, Any], list[str]] = {}
    for name, ops in below.items():
        held = frozenset(
            (*map(stem_of, op.path[depth + 1 :]), op.location, op.shapes)
            for op in ops
            if op.shapes
        )
        alike.setdefault((stem_of(name), held), []).append(name)
    children = []
    for group in alike.values():
        inside = tuple(op for name in group for op in below[name])
        children.append(module_of(tuple(group), inside, depth + 1))
    paths = frozenset(op.path[:depth] for op in operations)
    return Module(operations, paths, names, tuple(own), tuple(children))


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


def operations(
    entries: list[Entry], caller: JaxprEqn | None = None, times: int = 1
) -> Iterator[Operation]:
    for entry in entries:
        if isinstance(entry, Record):
            yield Operation(replace(entry, caller=caller), times)
        else:
            known = caller is None or location(entry.eqn) is not None
            outer = entry.eqn if known else caller
            yield from operations(entry.entries, outer, times * _repeats(entry.eqn))


def options_inside(program: Any, scope: Scope) -> Iterator[Options]:
    """The options in force for each operation; conversions are alike under any."""
    for eqn in program.eqns:
        inside, name = scope.enter(eqn.source_info.name_stack), eqn.primitive.name
        if name in _CALLS:
            for inner in jaxprs_in_params(eqn.params):
                yield from options_inside(inner, inside)
        elif name != "convert_element_type" and inside.region:
            yield inside.region


def _repeats(eqn: JaxprEqn) -> int:
    """How often the program that an equation holds runs, as far as can be told."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
    return 1


class PolicyEntry(NamedTuple):
    """One entry of a policy.

    Attributes:
      kind: `'primitive'`, `'function'` or `'scope'`.
      name: its name or pattern.
      rule: its rule.
      added: whether it is not in the policy of jamp's that has most of its entries.
    """

    kind: str
    name: str
    rule: Rule
    added: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.rule.value})"


@dataclass(frozen=True, repr=False)
class Figures(Counted):
    """What is known of a function under autocast; see `Report`."""

    name: str
    options: Options
    regions: tuple[Options, ...] = ()
    residuals: Residuals | None = None
    risks: tuple[str, ...] = ()

    @property
    def header(self) -> str:
        """A line on the device type, dtype and policy, and on those of regions."""
        found = dict.fromkeys(map(_words, (self.options, *self.regions)))
        return f"autocast {'; in regions: '.join(found)}"

    @property
    def records(self) -> tuple[Record, ...]:
        """One decision record per equation, those of inner programs included."""
        return tuple(op.record for op in self.operations)

    @property
    def unknown(self) -> tuple[Record, ...]:
        """Equations that ran as traced because the policy does not know them."""
        return tuple(r for r in self.records if r.ruling.origin is Origin.DEFAULT)

    @cached_property
    def unused(self) -> tuple[PolicyEntry, ...]:
        """Entries of the policy that decided about no operation."""
        policy = self.options.policy
        rulings = [op.record.ruling for op in self.operations]
        used = {(r.origin.value, r.entry) for r in rulings if r.policy == policy.name}
        used |= {("function", op.function or "") for op in self.operations}
        own = set(entries(policy))
        added = min((own - set(entries(Policy.load(b))) for b in BUILTIN), key=len)
        return tuple(
            PolicyEntry(*entry, added=entry in added)
            for entry in entries(policy)
            if entry[:2] not in used
        )

    @property
    def attention(self) -> tuple[str, ...]:
        """What to know first, the gravest first: sentences, or none if all is well."""
        matmuls, found = self.matmuls, list[str]()
        wide = [op for op in matmuls if not op.record.low]
        reasons = ", ".join(sorted({op.reason for op in wide}))
        if wide and len(wide) == len(matmuls):
            found.append(f"NO MATMUL RUNS IN 16 BITS: {reasons}")
        unknown = sorted(Counter(record.primitive for record in self.unknown).items())
        if unknown:
            listed = ", ".join(f"{name} ({count})" for name, count in unknown)
            why = "ran as traced, because the policy does not know them"
            found.append(f"{why}: {listed}")
        added = ", ".join(str(entry) for entry in self.unused if entry.added)
        if added:
            why = "entries added to the policy that decided about nothing"
            found.append(f"{why}: {added}")
        if 0 < len(wide) < len(matmuls):
            found.append(
                f"{runs(wide)} of {runs(matmuls)} matmuls and convolutions "
                f"({1 - self.low_flop_share:.1%} of their FLOPs) do not run in 16 "
                f"bits: {reasons}"
            )
        return (*found, *self.risks)

    @cached_property
    def modules(self) -> Module:
        """The program as a tree of modules, which are its named scopes.

        What stands in none is under the name of the user's function. Modules beside
        each other that are numbered and alike are one.
        """
        return module_of((self.name,), self.operations)


def _words(options: Options) -> str:
    dtype = options.dtype.name if options.enabled else f"{options.dtype.name}, disabled"
    return f"on {options.device_type} to {dtype}, policy {options.policy.name}"
