"""A report in the terminal, by rich, which need not be installed for anything else."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jamp._explain import text
from jamp._explain.figures import Figures, Row
from jamp._policy.rules import RULE_NAMES

_STYLES = {"f16": "cyan", "bf16": "green", "f32": "yellow", "f64": "red", "-": ""}
# Their shares of the width beside that of the longest rule.
_OPERATIONS = {"operation": 22, "dtypes": 15, "why": 0, "where": 25}
_RULE = max(map(len, RULE_NAMES))


def renderables(report: Figures) -> Iterator[RenderableType]:
    """What rich prints of a report: warnings, figures, modules, operations."""
    yield Text(f"{report.name}: {report.header}", style="bold")
    if report.warnings:
        sentences = Text("\n".join(report.warnings))
        yield Panel(sentences, title="warnings", border_style="red")
    yield Text("\n".join([*text.summary(report), ""]))
    table = _table(module=0)
    for name in text.FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    for module in report.modules.walk():
        name = "  " * len(module.around) + module.name
        table.add_row(Text(name), *text.figures(module))
    yield table
    yield Text()
    # Columns below each heading have the same widths.
    for heading, rows in text.sections(text.in_order(report)):
        if heading:
            yield Text(heading, style="bold")
        table = _table(**_OPERATIONS)
        table.show_header = not heading
        for row in rows:
            why = text.why(row, report, row.first.entry)
            where = text.place(row, row.path)
            table.add_row(Text(text.brief(row)), _dtypes(row), Text(why), Text(where))
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
    return Text(" > ").join(
        Text("+").join(Text(name, _STYLES.get(name, "dim")) for name in names or "-")
        for names in (row.operands, row.results)
    )
