"""A report as one HTML page that loads nothing: `report.html`, filled in."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from linecache import getline
from string import Template

from jamp import _dtypes
from jamp._explain.figures import Counted, Figures, Module, Row, runs
from jamp._explain.names import short
from jamp._explain.residuals import bytes_by_dtype
from jamp._explain.text import FIGURES, amount, conversions, figures, size

_COLOURED = ("f16", "bf16", "f32", "f64")
# Modules this deep stand open at first.
_OPEN_DEPTH = 2


def page(report: Figures) -> str:
    template = files("jamp._explain").joinpath("report.html").read_text("utf-8")
    rows = [row for module in report.modules.walk() for row in module.rows]
    flops = Counter[str]()
    for row in rows:
        flops[_computes_in(row)] += int(row.flops)
    return Template(template).substitute(
        name=escape(report.name),
        header=escape(report.header),
        attention=_attention(report.warnings),
        cards="\n".join(_cards(report, flops)),
        dtypes=_buttons("dtype", map(_computes_in, rows)),
        rules=_buttons("rule", (row.first.record.ruling.rule.value for row in rows)),
        tree="\n".join(_tree(report.modules)),
    )


def frame(report: Figures) -> str:
    """The page inside another, as in a notebook, whose styles do not mix with its."""
    style = "width: 100%; height: 42rem; border: 0"
    return f'<iframe style="{style}" srcdoc="{escape(page(report))}"></iframe>'


def _attention(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    if not items:
        return '<section class="attention good">Nothing needs attention.</section>'
    return (
        '<section class="attention bad"><strong>Needs attention</strong>'
        f"<ul>{items}</ul></section>"
    )


def _cards(report: Figures, flops: Mapping[str, int]) -> Iterator[str]:
    nbytes = report.result_bytes
    arrows = escape(conversions(report)).replace("-&gt;", "&rarr;").split(", ")
    listed = ", ".join(f"<span>{arrow}</span>" for arrow in arrows)
    casts = f"{listed}<br>read and write {size(report.cast_bytes)} unless fused"
    cards = [
        (
            "FLOPs in 16 bits",
            f"{report.low_flop_share:.1%}" if report.knows_flops else "not known",
            _bar(flops),
            f"{report.low_matmuls} of {runs(report.matmuls)} matmuls and "
            f"convolutions, {amount(report.flops, 'FLOP')}",
        ),
        (
            "Results in 16 bits",
            f"{report.low_byte_share:.1%}",
            _bar(nbytes),
            f"of the {size(sum(nbytes.values()))} that operations write",
        ),
        ("Casts inserted", report.casts, "", casts if report.casts else "none needed"),
    ]
    if report.residuals is not None:
        kept, written = map(bytes_by_dtype, report.residuals)
        before, after = sum(written.values()), size(sum(kept.values()))
        note = f"{size(before)} by the function as written"
        cards.append(("Kept for the backward pass", after, _bar(kept, before), note))
    for title, value, bar, note in cards:
        yield (
            f'<div class="card"><h2>{title}</h2><div class="big">{value}</div>'
            f"{bar}<p>{note}</p></div>"
        )


def _bar(amounts: Mapping[str, float], whole: float = 0) -> str:
    """A bar of one part for each dtype, whose length stands for at least their sum."""
    whole = max(whole, sum(amounts.values())) or 1
    parts, words = "", []
    for name, part in amounts.items():
        width, word = f"{part / whole:.2%}", f"{escape(name)}: {part / whole:.1%}"
        if width != "0.00%":
            words.append(word)
            parts += (
                f'<i class="{_colour(short(name))}" style="width: {width}" '
                f'title="{word}"></i>'
            )
    label = ", ".join(words) or "nothing"
    return f'<div class="bar" role="img" aria-label="{label}">{parts}</div>'


def _buttons(kind: str, values: Iterable[str]) -> str:
    """One button for each value there is, which filters by it."""
    return " ".join(
        f'<button type="button" class="{_colour(value)}" data-{kind}="{escape(value)}" '
        f'aria-pressed="false">{escape(value)} <span class="count">{count}</span>'
        "</button>"
        for value, count in sorted(Counter(values).items())
    )


def _tree(module: Module) -> Iterator[str]:
    """A module and all that stands in it, line by line."""
    number, depth = sum(op.decided for op in module.operations), len(module.around)
    state = " open" if depth < _OPEN_DEPTH else ""
    yield (
        f'<details{state} style="--depth: {depth}"><summary class="line">'
        f'<span class="title">{escape(module.name)} '
        f'<span class="count">{number} operation{"s" * (number != 1)}</span></span>'
        f"<span>{_bar(module.result_bytes)}</span>{_figures(module)}</summary>"
    )
    for child in module.children:
        yield from _tree(child)
    yield from map(_row, module.rows)
    yield "</details>"


def _row(row: Row) -> str:
    dtype, rule = _computes_in(row), row.first.record.ruling.rule.value
    found = row.first.location
    source = getline(found.file, found.line).strip() if found else ""
    code = f" <code>{escape(source)}</code>" if source else ""
    path = "/".join(" ".join(module.names) for module in row.module.lineage)
    parts = (row.first.why, *map(str, row.notes), row.only, row.often)
    why = "; ".join(filter(None, parts))
    operands, results = (
        " ".join(f'<span class="chip {_colour(n)}">{escape(n)}</span>' for n in names)
        for names in (row.operands, row.results)
    )
    return (
        f'<div class="line row {_colour(dtype)}" data-dtype="{escape(dtype)}" '
        f'data-rule="{rule}" data-path="{escape(path)}" '
        f'style="--depth: {len(row.module.around) + 1}"><span class="title">'
        f'{escape(row.name)} <span class="why">{escape(why)}</span>'
        f"<small>{escape(row.location)}{code}</small></span>"
        f"<span>{operands} &rarr; {results}</span>"
        f"{_figures(row)}</div>"
    )


def _computes_in(row: Row) -> str:
    """The floating dtype of the operands of its largest operation, the widest."""
    largest = max(row.operations, key=lambda op: (op.flops, op.result_bytes.total()))
    dtypes = [d for d in largest.record.operands if d is not None]
    floats = [d for d in dtypes if _dtypes.eligible(d) or _dtypes.is_double(d)]
    return short(max(floats, key=lambda d: d.itemsize)) if floats else "other"


def _figures(counted: Counted) -> str:
    return "".join(
        f'<span><span class="label">{label} </span>{value}</span>'
        if value
        else "<span></span>"
        for label, value in zip(FIGURES, figures(counted), strict=True)
    )


def _colour(dtype: str) -> str:
    return dtype if dtype in _COLOURED else "other"
