"""A report as plain text, and the lines and words that every form of it shows."""

import linecache
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jamp import _dtypes
from jamp._explain.operations import Counted, Figures, Module, Operation, runs, spans
from jamp._explain.residuals import bytes_by_dtype
from jamp._plan.records import Origin
from jamp._policy.rules import Rule
from jamp._tracing.origin import Location

HEAD = ("operation", "computes in", "returns", "why", "where", "casts")
FIGURES = ("FLOPs", "16 bits", "results", "casts")
MODULE_HEAD = ("module", "dtype", *FIGURES, "where")

_EXACT = ("bool", "int", "uint")
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}

# How wide a name may be, and a path of modules.
_NAME, _PATH = 20, 20
# Where a long name may be cut.
_WORD = re.compile(r"(?<=[_./])|(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Row(Counted):
    """What a report shows in one line: equations of one call, or of one kind."""

    modules: tuple[Module, ...] = ()  # those that lead to it, outermost first

    @property
    def first(self) -> Operation:
        return self.operations[0]

    @cached_property
    def _alike(self) -> tuple[Module, ...]:
        """The modules down to the innermost that is several, if one is."""
        several = [i for i, m in enumerate(self.modules, 1) if len(m.names) > 1]
        return self.modules[: max(several, default=0)]

    @property
    def heading(self) -> str:
        """What holds of it and those beside it: the modules that are alike, scans."""
        often, alike = self.often, self._alike
        if not alike:
            return f"in loops, {often}:" if often else ""
        path = "/".join(spans(module.names) for module in alike)
        each = f", each {often}" if often else ""
        return f"{path}, the same {len(alike[-1].paths)} times{each}:"

    @property
    def only(self) -> str:
        """Which of the modules that are alike it stands in, if not in all."""
        alike = self._alike
        every = alike[-1].paths if alike else frozenset()
        found = {op.path[: len(alike)] for op in self.operations}
        few = min(found, every - found, key=len)
        levels = [
            spans(name for name in module.names if name in {path[i] for path in few})
            for i, module in enumerate(alike)
            if few and len(module.names) > 1
        ]
        names = "/".join(levels)
        return names and f"{'only' if few == found else 'not'} {names}"

    @property
    def path(self) -> str:
        """The modules that the heading does not name."""
        inner = self.modules[len(self._alike) :] if self.first.scope else ()
        return "/".join(module.name for module in inner)

    @property
    def name(self) -> str:
        """The listed function, or the primitive and how many equations of it."""
        count = len(self.operations) // len({op.path for op in self.operations})
        if self.first.function or count == 1:
            return self.first.entry
        return f"{self.first.entry} x{count}"

    @property
    def brief(self) -> str:
        """The name; of a function's only the end if it is long."""
        function = self.first.function
        if function is None or len(function) <= _NAME:
            return self.name
        last = function.rpartition(".")[2]
        if len(last) <= _NAME:
            return last
        words = _WORD.split(last)
        return f"{words[0]}..{_end(last, _NAME - len(words[0]) - 2)}"

    @property
    def often(self) -> str:
        """How often the scans run that it stands in."""
        return f"{self.first.times} times" if self.first.times > 1 else ""

    @property
    def rule(self) -> str:
        return self.first.record.ruling.rule.value

    @property
    def operands(self) -> tuple[str, ...]:
        return _names(d for op in self.operations for d in op.record.operands)

    @property
    def results(self) -> tuple[str, ...]:
        records = [op.record for op in self.operations]
        if self.first.function is None:
            return _names(d for record in records for d in record.results)
        # What one of them hands to another does not leave the function.
        read = {id(var) for record in records for var in record.eqn.invars}
        leaving = _names(
            dtype
            for record in records
            if record.returns
            for var, dtype in zip(record.eqn.outvars, record.returns, strict=True)
            if id(var) not in read
        )
        return leaving or _names(records[-1].results)

    @property
    def computes_in(self) -> str:
        """The floating dtype of the operands of its largest operation, the widest."""
        sizes = [(op.flops, op.result_bytes.total()) for op in self.operations]
        largest = self.operations[sizes.index(max(sizes))]
        dtypes = [d for d in largest.record.operands if d is not None]
        floats = [d for d in dtypes if _dtypes.eligible(d) or _dtypes.is_float64(d)]
        if not floats:
            return "other"
        return short(str(max(floats, key=lambda d: d.itemsize)))

    def why(self, policy: str = "", name: str = "") -> str:
        """The rule and its source; `policy` and `name` are known to the reader."""
        ruling, uncast = self.first.record.ruling, self.first.uncast is not None
        listed = ruling.origin in (Origin.SCOPE, Origin.FUNCTION, Origin.PRIMITIVE)
        known = listed and not uncast and ruling.policy == policy
        reason = ruling.label if known else self.first.reason
        if uncast or ruling.rule is Rule.AS_TRACED:
            return reason
        rule = ruling.rule.value
        return rule if known and reason == name else f"{rule}: {reason}"

    @property
    def location(self) -> str:
        """The user's line, and the one of a library that it led to."""
        lines = map(line_of, (self.first.location, self.first.library))
        return " > ".join(filter(None, lines))

    @property
    def code(self) -> str:
        found = self.first.location
        return linecache.getline(found.file, found.line).strip() if found else ""

    @property
    def conversions(self) -> str:
        counts = Counter[str]()
        for op in self.operations:
            for cast in op.record.casts:
                pair = f"{short(cast.source.name)}->{short(cast.target.name)}"
                counts[pair] += op.times
        return ", ".join(f"{count} {cast}" for cast, count in sorted(counts.items()))


def rows(
    operations: Iterable[Operation], modules: tuple[Module, ...] = ()
) -> list[Row]:
    """One row for each function on a line, for modules that are alike together.

    Calls are left out.
    """
    groups: dict[Any, list[Operation]] = {}
    for op in filter(lambda op: op.decided, operations):
        key = (op.entry, op.record.ruling.rule, op.reason, op.location, op.library)
        groups.setdefault((*key, op.times, op.path), []).append(op)
    alike: dict[Any, list[Operation]] = {}
    for (*key, _), group in groups.items():
        row = Row(tuple(group))
        known = (*key, len(group), row.operands, row.results)
        alike.setdefault(known, []).extend(group)
    return [Row(tuple(group), modules) for group in alike.values()]


def rows_of(module: Module, around: tuple[Module, ...] = ()) -> Iterator[Row]:
    """The rows of a module and of those inside, module by module."""
    yield from rows(module.own, around)
    for child in module.children:
        yield from rows_of(child, (*around, child))


def in_order(report: Figures) -> list[Row]:
    """The same in program order, where modules that are alike stand once."""
    order = {id(op): i for i, op in enumerate(report.operations)}
    return sorted(rows_of(report.modules), key=lambda row: order[id(row.first)])


def short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)


def _end(name: str, width: int) -> str:
    """The last words of a name that fit."""
    words = _WORD.split(name)
    while len(words) > 1 and len("".join(words)) > width:
        del words[0]
    return "".join(words)[-width:]


def place(row: Row, path: str = "") -> str:
    """A path of modules, of a long one the end, and a line; or two lines alone."""
    path = path or row.path
    if len(path) > _PATH:
        path = "" if row.first.library else f"..{_end(path, _PATH - 2)}"
    return " ".join(filter(None, (row.only, path, row.location))) or "-"


def line_of(found: Location | None) -> str:
    return f"{Path(found.file).name}:{found.line}" if found else ""


def joined(names: Iterable[str]) -> str:
    """Names of dtypes in one word, which says nothing of integers beside floats."""
    every = list(names)
    return "+".join([n for n in every if not n.startswith(_EXACT)] or every) or "-"


def _names(dtypes: Iterable[Any]) -> tuple[str, ...]:
    known = (short(str(d)) for d in dtypes if d is not None)
    return tuple(dict.fromkeys(known))


def amount(value: float, unit: str = "") -> str:
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}{unit}".rstrip()


def size(nbytes: float) -> str:
    prefixes = ["", "Ki", "Mi", "Gi", "Ti"]
    while nbytes >= 1023.95 and len(prefixes) > 1:
        nbytes /= 1024
        del prefixes[0]
    return f"{nbytes:.{1 if prefixes[0] else 0}f} {prefixes[0]}B"


def text(report: Figures, group: str) -> str:
    table: list[tuple[str, ...] | str]
    if group == "module":
        lines = [MODULE_HEAD, *_modules(report.modules)]
        # Modules have no dtype, so that their names may be longer.
        width = max(len(name) for name, dtype, *_ in lines if dtype)
        names = (f"{n:{width}}  {dtype}" if dtype else n for n, dtype, *_ in lines)
        table = [(n, *rest) for n, (_, _, *rest) in zip(names, lines, strict=True)]
    else:
        every = in_order(report)
        if group == "equation":
            every = [Row((op,)) for op in report.operations]
        table, heading = [HEAD], ""
        for row in every:
            if row.heading != heading:
                heading = row.heading
                table.append(heading or "once:")
            table.append(_line(row, report, group))
    head = [report.header, *report.attention, *summary(report)]
    return "\n".join([*head, "", *_aligned(table)])


def summary(report: Figures) -> Iterator[str]:
    count = len(report.operations)
    yield (
        f"{count} equation{'s' * (count != 1)}, {report.casts} casts inserted, "
        f"{report.low_matmuls} of {runs(report.matmuls)} matmuls and convolutions in "
        f"16 bits ({report.low_flop_share:.1%} of FLOPs)"
    )
    yield (
        f"results take {size(sum(report.result_bytes.values()))}, "
        f"{report.low_byte_share:.1%} of it in 16 bits; "
        f"casts read and write {size(report.cast_bytes)}"
    )
    if report.residuals is not None:
        kept, written = (
            sum(bytes_by_dtype(found).values()) for found in report.residuals
        )
        yield (
            f"{size(kept)} kept for the backward pass, {size(written)} by the function "
            "as written"
        )


def _line(row: Row, report: Figures, group: str) -> tuple[str, ...]:
    if group == "function":
        name, entry, casts = row.brief, row.first.entry, str(row.casts or "")
        where = place(row)
    else:
        name = entry = row.first.record.primitive
        casts = row.conversions
        where = place(row, "/".join(row.first.record.scope))
    reason = row.why(report.options.policy.name, entry)
    return (name, joined(row.operands), joined(row.results), reason, where, casts)


def _modules(
    module: Module, around: tuple[Module, ...] = ()
) -> Iterator[tuple[str, ...]]:
    indent = "  " * len(around)
    yield (f"{indent}{module.name}", "", *figures(module), "")
    for row in rows(module.own, around):
        more = filter(None, (row.brief, row.only, row.often))
        name, dtype = f"{indent}  - {', '.join(more)}", joined(row.operands)
        yield (name, dtype, *figures(row), line_of(row.first.location))
    for child in module.children:
        yield from _modules(child, (*around, child))


def figures(counted: Counted) -> tuple[str, ...]:
    if not counted.flops:
        flops = ("", "")
    else:
        flops = (amount(counted.flops), f"{counted.low_flop_share:.1%}")
    nbytes = sum(counted.result_bytes.values())
    return (*flops, size(nbytes) if nbytes else "", str(counted.casts or ""))


def _aligned(table: Sequence[tuple[str, ...] | str]) -> Iterator[str]:
    """Lines of cells in columns; a heading stands above them as it is."""
    cells = [line for line in table if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in table:
        if isinstance(line, str):
            yield line
        else:
            pairs = zip(line, widths, strict=True)
            yield "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()
