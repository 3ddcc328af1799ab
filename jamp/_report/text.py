"""A report as plain text: figures, and aligned columns under them."""

from __future__ import annotations

from collections.abc import Iterator

from jamp._report.figures import Figures
from jamp._report.operations import Counted, Module
from jamp._report.residuals import bytes_by_dtype
from jamp._report.rows import Row, amount, joined, rows, share, size

HEAD = ("operation", "computes in", "returns", "why", "where", "casts")
MODULE_HEAD = ("module", "dtype", "FLOPs", "16 bits", "results", "casts", "where")


def text(report: Figures, group: str) -> str:
    """The report as text; see `Report.text`."""
    if group == "module":
        table = [MODULE_HEAD, *_modules(report.modules)]
    elif group == "function":
        table = [HEAD, *(_function(row, report) for row in rows(report.operations))]
    else:
        table = [HEAD, *(_equation(Row((op,)), report) for op in report.operations)]
    head = [report.header, *report.attention, *summary(report)]
    return "\n".join([*head, "", *_aligned(table)])


def summary(report: Figures) -> Iterator[str]:
    """Sentences with the figures of the whole program."""
    matmuls = report.matmuls
    low = sum(op.record.low for op in matmuls)
    yield (
        f"{len(report.operations)} equations, {report.casts} casts inserted, "
        f"{low} of {len(matmuls)} matmuls and convolutions in 16 bits "
        f"({share(report.low_flop_share)} of FLOPs)"
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


def _function(row: Row, report: Figures) -> tuple[str, ...]:
    reason = row.briefly_why(report.options.policy.name, row.entry)
    return (row.brief, *_dtypes(row), reason, row.where, str(row.casts or ""))


def _equation(row: Row, report: Figures) -> tuple[str, ...]:
    reason = row.briefly_why(report.options.policy.name, row.primitive)
    return (row.primitive, *_dtypes(row), reason, row.where, row.conversions)


def _dtypes(row: Row) -> tuple[str, str]:
    return joined(row.operands), joined(row.results)


def _modules(module: Module, depth: int = 0) -> Iterator[tuple[str, ...]]:
    indent = "  " * depth
    yield (f"{indent}{module.name}", "", *figures(module), "")
    for row in rows(module.own):
        name, dtype = f"{indent}  - {row.brief}", joined(row.operands)
        yield (name, dtype, *figures(row), row.place)
    for child in module.children:
        yield from _modules(child, depth + 1)


def figures(counted: Counted) -> tuple[str, ...]:
    """FLOPs, the share of them in 16 bits, bytes of results, and casts, as words."""
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
