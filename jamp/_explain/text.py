"""A report as plain text, and the lines and words that every form of it shows."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from jamp._explain.figures import Counted, Figures, Row, runs
from jamp._explain.names import line_of, short
from jamp._explain.residuals import bytes_by_dtype
from jamp._plan.records import Note

HEAD = ("operation", "computes in", "returns", "why", "where", "casts")
FIGURES = ("FLOPs", "16 bits", "results", "casts")
MODULE_HEAD = ("module", "dtype", *FIGURES, "where")

_EXACT = ("bool", "int", "uint")
# How wide a name may be, and a path of modules.
_NAME, _PATH = 20, 28
# Where a long name may be cut, and a path.
_MODULE = re.compile("(?<=/)")
_WORD = re.compile(r"(?<=[_./])|(?<=[a-z])(?=[A-Z])")


def text(report: Figures, group: str) -> str:
    table = _modules(report) if group == "module" else _operations(report, group)
    head = [report.header, *report.warnings, *summary(report), ""]
    return "\n".join([*head, *_aligned([*table])])


def summary(report: Figures) -> Iterator[str]:
    count = len(report.operations)
    share = f" ({report.low_flop_share:.1%} of FLOPs)" if report.knows_flops else ""
    yield (
        f"{count} equation{'s' * (count != 1)}, {report.casts} casts inserted, "
        f"{report.low_matmuls} of {runs(report.matmuls)} matmuls and convolutions in "
        f"16 bits{share}"
    )
    yield (
        f"all results together take {size(sum(report.result_bytes.values()))}, "
        f"{report.low_byte_share:.1%} of it in 16 bits; "
        f"casts read and write {size(report.cast_bytes)}"
    )
    if report.residuals is not None:
        totals = (sum(bytes_by_dtype(found).values()) for found in report.residuals)
        kept, written = map(size, totals)
        yield f"{kept} kept for the backward pass, {written} by the function as written"


def sections(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows below the headings that hold of them; above the first there is none."""
    found, heading = [("", list[Row]())], ""
    for row in rows:
        if row.heading != heading:
            heading = row.heading
            found.append((heading or "once:", []))
        found[-1][1].append(row)
    return found


def in_order(report: Figures) -> list[Row]:
    """The rows in program order, where modules that are alike stand once."""
    order = {id(op): i for i, op in enumerate(report.operations)}
    rows = chain.from_iterable(module.rows for module in report.modules.walk())
    return sorted(rows, key=lambda row: order[id(row.first)])


def _operations(report: Figures, group: str) -> Iterator[tuple[str, ...]]:
    rows = in_order(report)
    if group == "equation":
        rows = [Row((op,), report.modules) for op in report.operations]
    yield HEAD
    for heading, found in sections(rows):
        yield from [(heading,)] if heading else []
        for row in found:
            name, entry = brief(row), row.first.entry
            path, casts = row.path, str(row.casts or "")
            if group == "equation":
                name = entry = row.first.record.primitive
                path, casts = "/".join(row.first.record.scope), conversions(row)
            dtypes = joined(row.operands), joined(row.results)
            reason = why(row, report, entry)
            yield name, *dtypes, reason, place(row, path), casts


def _modules(report: Figures) -> Iterator[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [MODULE_HEAD]
    for module in report.modules.walk():
        indent = "  " * len(module.around)
        lines.append((indent + module.name, "", *figures(module), ""))
        for row in module.rows:
            name = ", ".join(filter(None, (brief(row), row.only, row.often)))
            where = joined(row.operands), *figures(row), line_of(row.first.location)
            lines.append((f"{indent}  - {name}", *where))
    # Modules have no dtype, so that their names may be longer.
    width = max(len(name) for name, dtype, *_ in lines if dtype)
    for name, dtype, *cells in lines:
        yield f"{name:{width}}  {dtype}" if dtype else name, *cells


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines of cells in columns; a heading, the only cell, stands in none."""
    cells = [line for line in table if len(line) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in table:
        pairs = zip(line, widths, strict=False)
        yield "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()


def brief(row: Row) -> str:
    """The name; of a function's only the end if it is long."""
    function = row.first.function
    if function is None or len(function) <= _NAME:
        return row.name
    last = function.rpartition(".")[2]
    if len(last) <= _NAME:
        return last
    first, *_ = _WORD.split(last)
    return f"{first}..{_end(_WORD.split(last), _NAME - len(first) - 2)}"


def why(row: Row, report: Figures, name: str) -> str:
    """The rule and its source, of which the policy and the name are known; notes."""
    words = row.first.why.removesuffix(f" in {report.options.policy.name}")
    notes = [f"({_cut(note)})" for note in row.notes]
    return " ".join([words.removesuffix(f": {name}"), *notes])


def _cut(note: Note) -> str:
    """A note that names one reader, by the end of its name."""
    first, *others = note.readers or [""]
    names = (first.rpartition(".")[2], "..." if others else "")
    return str(note._replace(readers=tuple(filter(None, names))))


def place(row: Row, path: str) -> str:
    """A path of modules, of a long one the end, and a line; or two lines alone."""
    if len(path) > _PATH:
        path = (
            ""
            if row.first.library
            else f"..{_end(_MODULE.split(path), _PATH - 2, least=2)}"
        )
    return " ".join(filter(None, (row.only, path, row.location))) or "-"


def _end(parts: Sequence[str], width: int, least: int = 1) -> str:
    """The last parts of a name that fit; where the last `least` do not, their end."""
    ends = ["".join(parts[i:]) for i in range(max(1, len(parts) - least + 1))]
    return next((end for end in ends if len(end) <= width), ends[-1][-width:])


def joined(names: Iterable[str]) -> str:
    """Names of dtypes in one word, which says nothing of integers beside floats."""
    every = list(names)
    return "+".join([n for n in every if not n.startswith(_EXACT)] or every) or "-"


def conversions(counted: Counted) -> str:
    counts = Counter[str]()
    for op in counted.operations:
        for cast in op.record.casts:
            counts[f"{short(cast.source)}->{short(cast.target)}"] += op.times
    return ", ".join(f"{count} {cast}" for cast, count in sorted(counts.items()))


def figures(counted: Counted) -> tuple[str, ...]:
    """The cells of the columns `FIGURES`; empty for zero."""
    flops = amount(counted.flops) if counted.flops else ""
    known = counted.flops and counted.knows_flops
    share = f"{counted.low_flop_share:.1%}" if known else ""
    nbytes = sum(counted.result_bytes.values())
    return flops, share, size(nbytes) if nbytes else "", str(counted.casts or "")


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
