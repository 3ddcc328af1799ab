"""A report as plain text, and the lines and words that every form of it shows."""

import linecache
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jamp import _dtypes
from jamp._explain.operations import Counted, Figures, Module, Operation
from jamp._explain.residuals import bytes_by_dtype
from jamp._plan.records import Origin
from jamp._policy.rules import Rule

HEAD = ("operation", "computes in", "returns", "why", "where", "casts")
FIGURES = ("FLOPs", "16 bits", "results", "casts")
MODULE_HEAD = ("module", "dtype", *FIGURES, "where")

_EXACT = ("bool", "int", "uint")
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}

# How wide a name may be, a path of modules, and at least the last of them.
_NAME, _PATH, _LAST = 20, 20, 7


@dataclass(frozen=True)
class Row(Counted):
    """What a report shows in one line: equations of one call, or of one kind."""

    @property
    def first(self) -> Operation:
        return self.operations[0]

    @property
    def name(self) -> str:
        """The listed function, or the primitive and how many equations of it."""
        count = 1 if self.first.function else len(self.operations)
        return self.first.entry if count == 1 else f"{self.first.entry} x{count}"

    @property
    def brief(self) -> str:
        """The name; of a function's only the end if it is long."""
        function = self.first.function
        if function is None or len(function) <= _NAME:
            return self.name
        return _cut(function.rpartition(".")[2], _NAME)

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
        found = self.first.location
        return f"{Path(found.file).name}:{found.line}" if found else ""

    @property
    def path_and_location(self) -> str:
        path = _path(self.first.record.scope)
        return " ".join(part for part in (path, self.location) if part) or "-"

    @property
    def code(self) -> str:
        found = self.first.location
        return linecache.getline(found.file, found.line).strip() if found else ""

    @property
    def conversions(self) -> str:
        counts = Counter(
            f"{short(cast.source.name)}->{short(cast.target.name)}"
            for op in self.operations
            for cast in op.record.casts
        )
        return ", ".join(f"{count} {cast}" for cast, count in sorted(counts.items()))


def rows(operations: Iterable[Operation]) -> list[Row]:
    """One row for each function on a line, in program order; calls are left out."""
    groups: dict[Any, list[Operation]] = {}
    for op in operations:
        if op.decided:
            rule, scope = op.record.ruling.rule, op.record.scope
            key = (op.entry, rule, op.reason, op.location, scope)
            groups.setdefault(key, []).append(op)
    return [Row(tuple(group)) for group in groups.values()]


def short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)


def _path(scope: tuple[str, ...]) -> str:
    """A path of modules; of a long one not the outermost and little of the middle."""
    path = "/".join(scope)
    if len(path) <= _PATH:
        return path
    *outer, last = scope[1:] or scope
    kept = list(outer)
    while kept and len("/".join([*kept, last[:_LAST]])) > _PATH:
        kept.pop()
    gap = [".."] if kept != outer else []
    head = "/".join([*kept, *gap, ""])
    return head + _cut(last, max(_PATH - len(head), _LAST))


def _cut(word: str, width: int) -> str:
    """A word without its middle if it is long."""
    if len(word) <= width:
        return word
    return f"{word[: width // 2 - 2]}..{word[-(width - width // 2) :]}"


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
    if group == "module":
        table = [MODULE_HEAD, *_modules(report.modules)]
    else:
        every = rows(report.operations)
        if group == "equation":
            every = [Row((op,)) for op in report.operations]
        table = [HEAD, *(_line(row, report, group) for row in every)]
    head = [report.header, *report.attention, *summary(report)]
    return "\n".join([*head, "", *_aligned(table)])


def summary(report: Figures) -> Iterator[str]:
    yield (
        f"{len(report.operations)} equations, {report.casts} casts inserted, "
        f"{report.low_matmuls} of {len(report.matmuls)} matmuls and convolutions in 16 "
        f"bits ({report.low_flop_share:.1%} of FLOPs)"
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
    else:
        name = entry = row.first.record.primitive
        casts = row.conversions
    reason = row.why(report.options.policy.name, entry)
    dtypes = joined(row.operands), joined(row.results)
    return (name, *dtypes, reason, row.path_and_location, casts)


def _modules(module: Module, depth: int = 0) -> Iterator[tuple[str, ...]]:
    indent = "  " * depth
    yield (f"{indent}{module.name}", "", *figures(module), "")
    for row in rows(module.own):
        name, dtype = f"{indent}  - {row.brief}", joined(row.operands)
        yield (name, dtype, *figures(row), row.location)
    for child in module.children:
        yield from _modules(child, depth + 1)


def figures(counted: Counted) -> tuple[str, ...]:
    if not counted.flops:
        flops = ("", "")
    else:
        flops = (amount(counted.flops), f"{counted.low_flop_share:.1%}")
    nbytes = sum(counted.result_bytes.values())
    return (*flops, size(nbytes) if nbytes else "", str(counted.casts or ""))


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in table
    ]
