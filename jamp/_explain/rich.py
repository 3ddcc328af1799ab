"""A report in the terminal, by rich, which need not be installed for anything else."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jamp._explain.operations import Figures, Module
from jamp._explain.text import FIGURES, Row, figures, rows, summary

_STYLES = {"f16": "cyan", "bf16": "green", "f32": "yellow", "f64": "red"}


def renderables(report: Figures) -> Iterator[RenderableType]:
    """What rich prints of a report: attention, figures, modules, operations."""
    yield Text(f"{report.name}: {report.header}", style="bold")
    if report.attention:
        yield Panel(
            Text("\n".join(report.attention)), title="attention", border_style="red"
        )
    yield Text("\n".join([*summary(report), ""]))
    yield _modules(report.modules)
    yield Text()
    yield _operations(report)


def _modules(module: Module) -> Table:
    table = _table("module")
    for name in FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    _add(table, module, 0)
    return table


def _add(table: Table, module: Module, depth: int) -> None:
    table.add_row(Text("  " * depth + module.name), *figures(module))
    for child in module.children:
        _add(table, child, depth + 1)


def _operations(report: Figures) -> Table:
    table = _table("operation", "dtypes", "why", "where")
    for row in rows(report.operations):
        table.add_row(
            Text(row.name),
            _dtypes(row),
            Text(row.why(report.options.policy.name, row.first.entry)),
            Text(row.path_and_location),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _dtypes(row: Row) -> Text:
    operands, results = (
        Text("+").join(Text(name, _STYLES.get(name, "dim")) for name in names)
        for names in (row.operands, row.results)
    )
    return Text(" > ").join([operands or Text("-"), results or Text("-")])
