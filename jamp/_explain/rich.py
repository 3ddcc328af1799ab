"""A report in the terminal, by rich, which need not be installed for anything else."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jamp._explain.operations import Figures, Module
from jamp._explain.text import FIGURES, Row, figures, in_order, place, summary
from jamp._policy.rules import RULE_NAMES

_STYLES = {"f16": "cyan", "bf16": "green", "f32": "yellow", "f64": "red"}
# Their shares of the width beside that of the longest rule.
_OPERATIONS = {"operation": 22, "dtypes": 15, "why": 0, "where": 25}
_RULE = max(map(len, RULE_NAMES))


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
    yield from _operations(report)


def _modules(module: Module) -> Table:
    table = _table(module=0)
    for name in FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    _add(table, module, 0)
    return table


def _add(table: Table, module: Module, depth: int) -> None:
    table.add_row(Text("  " * depth + module.name), *figures(module))
    for child in module.children:
        _add(table, child, depth + 1)


def _operations(report: Figures) -> Iterator[RenderableType]:
    """The rows below the headings that hold of them, in columns of the same widths."""
    table, heading = _table(**_OPERATIONS), ""
    for row in in_order(report):
        if row.heading != heading:
            yield table
            heading = row.heading
            yield Text(heading or "once:", style="bold")
            table = _table(**_OPERATIONS)
            table.show_header = False
        table.add_row(
            Text(row.brief),
            _dtypes(row),
            Text(row.why(report.options.policy.name, row.first.entry)),
            Text(place(row)),
        )
    yield table


def _table(**columns: int) -> Table:
    """A table of columns of some share of the width, or of what they need if 0."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.expand = any(columns.values())
    for name, ratio in columns.items():
        width = _RULE if name == "why" else None
        table.add_column(name, overflow="fold", ratio=ratio or None, width=width)
    return table


def _dtypes(row: Row) -> Text:
    operands, results = (
        Text("+").join(Text(name, _STYLES.get(name, "dim")) for name in names)
        for names in (row.operands, row.results)
    )
    return Text(" > ").join([operands or Text("-"), results or Text("-")])
