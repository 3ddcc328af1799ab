"""What is known of a program under autocast: in all, by module and by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from jamp import _dtypes
from jamp._explain.names import line_of, short_names, spans
from jamp._explain.operations import Operation, counted, is_opaque
from jamp._explain.residuals import Residuals
from jamp._plan.records import Note, Origin, Record
from jamp._policy.policy import Policy, entries
from jamp._policy.rules import BUILTIN, Rule
from jamp._tracing.locations import stem_of
from jamp._tracing.options import Options

_LOW = frozenset(dtype.name for dtype in _dtypes.LOW_DTYPES)


# Compared as objects: each holds the equations of its own trace.
@dataclass(frozen=True, eq=False)
class Counted:
    """Operations, and what is counted of them.

    Counted is the program as JAX traces it, before XLA fuses operations. What stands in
    a scan counts once for each iteration, and in a `shard_map` once for each device;
    the body of a while loop counts once, because nothing tells how often it runs, and
    of a conditional every branch counts. That holds for all numbers, of FLOPs and bytes
    as of `low_matmuls` and `casts`. The tuples `operations` and `matmuls` have an
    equation once, with how often it runs as its `times`. The insides of what autocast
    leaves alone, such as Pallas kernels, do not count.
    """

    operations: tuple[Operation, ...]  # the equations, those of inner programs included

    @property
    def matmuls(self) -> tuple[Operation, ...]:
        """The matmuls and convolutions, each once however often it runs."""
        return tuple(op for op in self.operations if op.record.is_product)

    @property
    def low_matmuls(self) -> int:
        """Number of matmuls and convolutions that compute on 16-bit operands."""
        return runs(op for op in self.matmuls if op.record.computes_low)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of all matmuls and convolutions."""
        return sum(op.flops for op in self.operations)

    @property
    def knows_flops(self) -> bool:
        """Whether `flops` are of all matmuls: none has a size that is unknown, or 0."""
        return all(op.record.flops for op in self.matmuls)

    @cached_property
    def low_flop_share(self) -> float:
        """Share, from 0 to 1, of `flops` that run on 16-bit operands.

        Of the number of matmuls where `flops` are not those of all, as of symbolic
        shapes.
        """
        if not self.knows_flops:
            return self.low_matmuls / max(runs(self.matmuls), 1)
        low = sum(op.flops for op in self.operations if op.record.computes_low)
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
        """Share, from 0 to 1, of `result_bytes` that are of 16-bit floats."""
        total = sum(self.result_bytes.values())
        low = sum(size for name, size in self.result_bytes.items() if name in _LOW)
        return low / total if total else 0.0

    @property
    def casts(self) -> int:
        """Number of conversions that autocast inserted into the program."""
        return sum(op.times * len(op.record.casts) for op in self.operations)

    @cached_property
    def cast_bytes(self) -> int:
        """Bytes that `casts` read and write, where XLA fuses none away."""
        return sum(op.cast_bytes for op in self.operations)


def runs(operations: Iterable[Operation]) -> int:
    return sum(op.times for op in operations)


@dataclass(frozen=True)
class Module(Counted):
    """A module of the program with all that stands in it, or several that are alike."""

    names: tuple[str, ...]  # the last part of their paths
    around: tuple[Module, ...] = ()  # those that it stands in, the program first

    @property
    def name(self) -> str:
        again = f", the same {len(self.names)} times" if len(self.names) > 1 else ""
        return spans(self.names) + again

    @cached_property
    def paths(self) -> set[tuple[str, ...]]:
        """Of each of those that are alike, those around it included."""
        return {op.path[: len(self.around)] for op in self.operations}

    @property
    def lineage(self) -> tuple[Module, ...]:
        """The modules that lead to it, and itself."""
        return (*self.around, self)[1:]

    @property
    def alike(self) -> tuple[Module, ...]:
        """Of these, those down to the innermost that is several, if one is."""
        if len(self.names) > 1:
            return self.lineage
        return self.around[-1].alike if self.around else ()

    @cached_property
    def own(self) -> tuple[Operation, ...]:
        """The operations that stand in none of its children."""
        return tuple(op for op in self.operations if len(op.path) == len(self.around))

    @cached_property
    def children(self) -> tuple[Module, ...]:
        """The modules inside.

        They are alike if their names differ by a number, and what they hold stands on
        the same lines, and makes arrays of the same shapes.
        """
        depth, around = len(self.around), (*self.around, self)
        below: dict[str, list[Operation]] = {}
        for op in self.operations:
            if len(op.path) > depth:
                below.setdefault(op.path[depth], []).append(op)
        alike: dict[Any, dict[str, list[Operation]]] = {}
        for name, ops in below.items():
            held = frozenset(
                (*map(stem_of, op.path[depth + 1 :]), op.location, op.shapes)
                for op in ops
                if op.shapes
            )
            alike.setdefault((stem_of(name), held), {})[name] = ops
        return tuple(
            Module(tuple(chain(*group.values())), tuple(group), around)
            for group in alike.values()
        )

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One for each function on a line, for modules that are alike together.

        Calls for which nothing was decided are left out.
        """
        calls: dict[Any, list[Operation]] = {}
        for op in self.own:
            if op.decided:
                # Of a function only what leaves it is read elsewhere.
                note = op.record.note if op.function is None else None
                changed = note and note.words
                key = op.entry, op.why, changed, op.location, op.library, op.times
                calls.setdefault((key, op.path), []).append(op)
        alike: dict[Any, list[Operation]] = {}
        for (key, _), ops in calls.items():
            row = Row(tuple(ops), self)
            known = (key, len(ops), row.operands, row.results)
            alike.setdefault(known, []).extend(ops)
        return tuple(Row(tuple(ops), self) for ops in alike.values())

    def walk(self) -> Iterator[Module]:
        """It and those inside, each before those that it holds."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Row(Counted):
    """What a report shows in one line: equations of one call, or of one kind."""

    module: Module  # the innermost that it stands in

    @property
    def first(self) -> Operation:
        return self.operations[0]

    @property
    def heading(self) -> str:
        """What holds of it and those beside it: the modules that are alike, scans."""
        often, alike = self.often, self.module.alike
        if not alike:
            return f"in loops, {often}:" if often else ""
        path = "/".join(spans(module.names) for module in alike)
        each = f", each {often}" if often else ""
        return f"{path}, the same {len(alike[-1].paths)} times{each}:"

    @property
    def only(self) -> str:
        """Which of the modules that are alike it stands in, if not in all."""
        alike = self.module.alike
        found = {op.path[: len(alike)] for op in self.operations}
        every = alike[-1].paths if alike else found
        few = min(found, every - found, key=len)
        names = "/".join(
            spans(name for name in module.names if name in inside)
            for module, *inside in zip(alike, *few, strict=True)
            if few and len(module.names) > 1
        )
        return names and f"{'only' if few == found else 'not'} {names}"

    @property
    def path(self) -> str:
        """The modules that the heading does not name."""
        inner = self.module.lineage[len(self.module.alike) :]
        return "/".join(module.name for module in inner if self.first.scope)

    @property
    def name(self) -> str:
        """The listed function, or the primitive and how many equations of it."""
        count = len(self.operations) // len({op.path for op in self.operations})
        one = self.first.function or count == 1
        return self.first.entry if one else f"{self.first.entry} x{count}"

    @property
    def often(self) -> str:
        """How often the scans run that it stands in."""
        return f"{self.first.times} times" if self.first.times > 1 else ""

    @property
    def operands(self) -> tuple[str, ...]:
        return short_names(d for op in self.operations for d in op.record.operands)

    @property
    def results(self) -> tuple[str, ...]:
        records = [op.record for op in self.operations]
        if self.first.function is None:
            return short_names(d for record in records for d in record.returned)
        # What one of them hands to another does not leave the function.
        read = {id(var) for record in records for var in record.eqn.invars}
        leaving = short_names(
            dtype
            for record in records
            if record.returns
            for var, found in zip(record.eqn.outvars, record.returns, strict=True)
            if found and id(var) not in read
            for dtype in found.dtypes
        )
        return leaving or short_names(records[-1].results)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Why there is float32 that the rule does not ask for."""
        readers: dict[str, dict[str, None]] = {}
        for note in filter(None, (op.record.note for op in self.operations)):
            readers.setdefault(note.words, {}).update(dict.fromkeys(note.readers))
        return tuple(Note(words, tuple(found)) for words, found in readers.items())

    @property
    def location(self) -> str:
        """The user's line, and the one of a library that it led to."""
        lines = map(line_of, (self.first.location, self.first.library))
        return " > ".join(filter(None, lines))


class PolicyEntry(NamedTuple):
    """One entry of a policy.

    Attributes:
      kind: `'primitive'`, `'function'` or `'scope'`.
      name: its name or pattern.
      rule: its rule.
      added: whether it is not in that policy of jamp's which differs least.
    """

    kind: str
    name: str
    rule: Rule
    added: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.rule.value})"


@dataclass(frozen=True, repr=False, eq=False)
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
        own, *inside = (
            f"on {found.device_type} to {found.dtype.name}"
            f"{'' if found.enabled else ', disabled'}, policy {found.policy.name}"
            for found in (self.options, *self.regions)
        )
        if inside and not self.options.enabled:
            where = "; ".join(dict.fromkeys(inside))
            return f"autocast where the function has it, {where}; the rest as written"
        return f"autocast {'; in regions: '.join(dict.fromkeys([own, *inside]))}"

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
        policy, rulings = self.options.policy, [r.ruling for r in self.records]
        used = {(r.origin.value, r.entry) for r in rulings if r.policy == policy}
        used |= {("function", r.function.name) for r in rulings if r.function}
        own = set(entries(policy))
        added = min((own - set(entries(Policy.load(b))) for b in BUILTIN), key=len)
        return tuple(
            PolicyEntry(*entry, added=entry in added)
            for entry in entries(policy)
            if entry[:2] not in used
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know first, the gravest first: sentences, or none if all is well."""
        matmuls = self.matmuls
        wide = [op for op in matmuls if not op.record.computes_low]
        reasons = ", ".join(sorted({op.reason for op in wide}))
        names, opaque = counted(self.unknown), counted(filter(is_opaque, self.records))
        added = ", ".join(str(entry) for entry in self.unused if entry.added)
        share = f" ({1 - self.low_flop_share:.1%} of their FLOPs)"
        sentences = [
            (0 < len(wide) == len(matmuls), f"NO MATMUL RUNS IN 16 BITS: {reasons}"),
            (names, f"ran as traced, because the policy does not know them: {names}"),
            (opaque, f"ran as traced, with all that is inside: {opaque}"),
            (added, f"entries added to the policy that decided about nothing: {added}"),
            (
                0 < len(wide) < len(matmuls),
                f"{runs(wide)} of {runs(matmuls)} matmuls and convolutions"
                f"{share if self.knows_flops else ''} do not run in 16 bits: {reasons}",
            ),
        ]
        return (*(sentence for holds, sentence in sentences if holds), *self.risks)

    @cached_property
    def modules(self) -> Module:
        """The program as a tree of modules, which are its named scopes.

        What stands in none is under the name of the user's function. Modules beside
        each other that are numbered and alike are one.
        """
        return Module(self.operations, (self.name,))
