"""A report as one HTML page that loads nothing: `report.html`, filled in."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from string import Template

from jamp._explain.operations import Counted, Figures, Module, runs
from jamp._explain.residuals import bytes_by_dtype
from jamp._explain.text import FIGURES, Row, amount, figures, rows, rows_of, short, size

_COLOURED = ("f16", "bf16", "f32", "f64")
# Modules this deep stand open at first.
_OPEN_DEPTH = 2


def page(report: Figures) -> str:
    file = files("jamp._explain").joinpath("report.html")
    template = file.read_text(encoding="utf-8")
    every = list(rows_of(report.modules))
    return Template(template).substitute(
        name=escape(report.name),
        header=escape(report.header),
        attention=_attention(report.attention),
        cards="\n".join(_cards(report)),
        dtypes=_buttons("dtype", (row.computes_in for row in every)),
        rules=_buttons("rule", (row.rule for row in every)),
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


def _cards(report: Figures) -> Iterator[str]:
    flops = Counter[str]()
    for row in rows_of(report.modules):
        flops[row.computes_in] += int(row.flops)
    yield _card(
        "FLOPs in 16 bits",
        f"{report.low_flop_share:.1%}",
        f"{report.low_matmuls} of {runs(report.matmuls)} matmuls and "
        f"convolutions, {amount(report.flops, 'FLOP')}",
        _bar(flops),
    )
    nbytes = report.result_bytes
    yield _card(
        "Results in 16 bits",
        f"{report.low_byte_share:.1%}",
        f"of the {size(sum(nbytes.values()))} that operations write",
        _bar(nbytes),
    )
    yield _card("Casts inserted", str(report.casts), _casts(report))
    if report.residuals is not None:
        kept, written = map(bytes_by_dtype, report.residuals)
        before = sum(written.values())
        yield _card(
            "Kept for the backward pass",
            size(sum(kept.values())),
            f"{size(before)} by the function as written",
            _bar(kept, before),
        )


def _casts(report: Figures) -> str:
    if not report.casts:
        return "none needed"
    words = Row(report.operations).conversions.split(", ")
    arrows = (escape(word).replace("-&gt;", "&rarr;") for word in words)
    listed = ", ".join(f"<span>{word}</span>" for word in arrows)
    return f"{listed}<br>read and write {size(report.cast_bytes)} unless fused"


def _card(title: str, value: str, note: str, *bars: str) -> str:
    return (
        f'<div class="card"><h2>{title}</h2><div class="big">{value}</div>'
        f"{''.join(bars)}<p>{note}</p></div>"
    )


def _bar(amounts: Mapping[str, float], whole: float = 0) -> str:
    """A bar of one part for each dtype, whose length stands for at least their sum."""
    whole = max(whole, sum(amounts.values())) or 1
    widths = {name: f"{part / whole:.2%}" for name, part in amounts.items()}
    seen = {name: width for name, width in widths.items() if width != "0.00%"}
    words = {name: f"{escape(name)}: {amounts[name] / whole:.1%}" for name in seen}
    parts = "".join(
        f'<i class="{_colour(short(name))}" style="width: {width}" '
        f'title="{words[name]}"></i>'
        for name, width in seen.items()
    )
    label = ", ".join(words.values()) or "nothing"
    return f'<div class="bar" role="img" aria-label="{label}">{parts}</div>'


def _buttons(kind: str, values: Iterable[str]) -> str:
    """One button for each value there is, which filters by it."""
    return " ".join(
        f'<button type="button" class="{_colour(value)}" data-{kind}="{escape(value)}" '
        f'aria-pressed="false">{escape(value)} <span class="count">{count}</span>'
        "</button>"
        for value, count in sorted(Counter(values).items())
    )


def _tree(module: Module, around: tuple[Module, ...] = ()) -> Iterator[str]:
    """A module and all that stands in it, line by line."""
    number = sum(op.decided for op in module.operations)
    state = " open" if len(around) < _OPEN_DEPTH else ""
    yield (
        f'<details{state} style="--depth: {len(around)}"><summary class="line">'
        f'<span class="title">{escape(module.name)} '
        f'<span class="count">{number} operation{"s" * (number != 1)}</span></span>'
        f"<span>{_bar(module.result_bytes)}</span>{_figures(module)}</summary>"
    )
    for child in module.children:
        yield from _tree(child, (*around, child))
    yield from map(_row, rows(module.own, around))
    yield "</details>"


def _row(row: Row) -> str:
    dtype = row.computes_in
    code = f" <code>{escape(row.code)}</code>" if row.code else ""
    path = "/".join(" ".join(module.names) for module in row.modules)
    why = "; ".join(filter(None, (row.why(), row.only, row.often)))
    return (
        f'<div class="line row {_colour(dtype)}" data-dtype="{escape(dtype)}" '
        f'data-rule="{row.rule}" data-path="{escape(path)}" '
        f'style="--depth: {len(row.modules) + 1}"><span class="title">'
        f'{escape(row.name)} <span class="why">{escape(why)}</span>'
        f"<small>{escape(row.location)}{code}</small></span>"
        f"<span>{_chips(row.operands)} &rarr; {_chips(row.results)}</span>"
        f"{_figures(row)}</div>"
    )


def _figures(counted: Counted) -> str:
    return "".join(
        f'<span><span class="label">{label} </span>{value}</span>'
        if value
        else "<span></span>"
        for label, value in zip(FIGURES, figures(counted), strict=True)
    )


def _chips(dtypes: Iterable[str]) -> str:
    return " ".join(
        f'<span class="chip {_colour(name)}">{escape(name)}</span>' for name in dtypes
    )


def _colour(dtype: str) -> str:
    return dtype if dtype in _COLOURED else "other"
