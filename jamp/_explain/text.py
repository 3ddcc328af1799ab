"""A report as plain text: figures, and aligned columns under them."""

from collections.abc import Iterator

from jamp._explain.figures import Figures
from jamp._explain.operations import Counted, Module
from jamp._explain.residuals import bytes_by_dtype
from jamp._explain.rows import Row, amount, joined, rows, share, size

HEAD = ("operation", "computes in", "returns", "why", "where", "casts")
FIGURES = ("FLOPs", "16 bits", "results", "casts")
MODULE_HEAD = ("module", "dtype", *FIGURES, "where")


def text(report: Figures, group: str) -> str:
    """The report as text; see `Report.text`."""
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
    """Sentences with the figures of the whole program."""
    yield (
        f"{len(report.operations)} equations, {report.casts} casts inserted, "
        f"{report.low_matmuls} of {len(report.matmuls)} matmuls and convolutions in 16 "
        f"bits ({share(report.low_flop_share)} of FLOPs)"
    )
    yield (
        f"results take {size(sum(report.result_bytes.values()))}, "
        f"{share(report.low_byte_share)} of it in 16 bits; "
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
    """The figures of `FIGURES`, as words."""
    if not counted.flops:
        flops = ("", "")
    else:
        flops = (amount(counted.flops), share(counted.low_flop_share))
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
