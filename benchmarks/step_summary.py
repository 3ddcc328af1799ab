"""The figures of the step benchmark: ratios, their table, their chart."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from measuring import BASELINE, Comparison
from rich.table import Table

STEP_RATIOS = {
    "step_ratio": BASELINE,
    "step_ratio_to_torch_float32": "torch float32",
}
MEMORY = ("temporary_ratio", "residual_ratio")
CASTS = ("casts_in_jaxpr", "casts_in_hlo")
COMPILATION = ("lowering_ratio", "compile_ratio")
SECONDS = ("lowering_seconds", "compile_seconds")

COLORS = {
    "autocast": "#0060b0",
    "memory": "#56b4e9",
    "step": "#332288",
    "both": "#e69f00",
    "by hand": "#d55e00",
    "jmp": "#009e73",
    "jaxamp": "#cc79a7",
    "float32": "#5f5f5f",
    "torch.compile": "#882255",
    "torch": "#b89000",
}
MARKERS = "osD^vP*X"


def summarise(comparison: Comparison, absolute: bool) -> dict[str, Any]:
    """The figures of a comparison as they are written.

    Times are ratios to the baseline's, with `absolute` milliseconds and seconds too.
    Those of steps are the median and the quartiles over the rounds.
    """
    rivals = {}
    base = comparison.figures.get(BASELINE, {})
    for name, figures in comparison.figures.items():
        seconds = comparison.seconds.get(name, [])
        kept = dict(figures)
        if not absolute:
            kept = {key: kept[key] for key in kept if key not in SECONDS}
        elif seconds:
            kept["step_ms"] = 1e3 * statistics.median(seconds)
        for stem in ("temporary_bytes", "residual_bytes", *SECONDS):
            if stem in figures and stem in base:
                key = f"{stem.rpartition('_')[0]}_ratio"
                kept[key] = ratio(figures[stem], base[stem])
        for key, baseline in STEP_RATIOS.items():
            step = ratios(seconds, comparison.seconds.get(baseline, []))
            if step and (baseline == BASELINE or name.startswith("torch")):
                kept[key] = step
        rivals[name] = kept
    return {
        "subject": comparison.subject,
        "size": comparison.size,
        "mode": comparison.mode,
        "rivals": rivals,
    }


def ratio(value: Any, base: Any) -> float | None:
    """The ratio of two figures, of their totals if they have any; None of nothing."""
    if isinstance(base, dict):
        value, base = value["total"], base["total"]
    return value / base if base else None


def ratios(seconds: list[float], base: list[float]) -> dict[str, Any] | None:
    """Median and quartiles of the ratios of times that were measured side by side."""
    if not seconds or not base:
        return None
    each = [mine / its for mine, its in zip(seconds, base, strict=True)]
    quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    return {"median": statistics.median(each), "quartiles": quartiles[::2]}


def table(summary: dict[str, Any]) -> Table:
    """The figures of one comparison, for the terminal."""
    title = "{subject} ({size}), {mode}, relative to float32".format(**summary)
    columns = ("step", "memory", "residuals", "casts", "in HLO", "lower", "compile")
    made = Table("rival", *columns, title=title)
    for name, figures in summary["rivals"].items():
        cells = [_cell(_step_ratio(figures))]
        cells += [_cell(figures.get(key)) for key in MEMORY]
        cells += [str(figures.get(key, "")) for key in CASTS]
        cells += [_cell(figures.get(key)) for key in COMPILATION]
        if "step_ms" in figures:
            cells[0] += f" {figures['step_ms']:.2f} ms"
        if "error" not in figures:
            made.add_row(name, *cells)
    return made


def errors(summary: dict[str, Any]) -> str:
    """A line for each rival that failed."""
    return "\n".join(
        f"{name}: {figures['error']}"
        for name, figures in summary["rivals"].items()
        if "error" in figures
    )


def _cell(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def draw(summaries: list[dict[str, Any]], path: Path) -> None:
    """Draws step times and memory, a column for each mode, a row for each subject.

    What was not measured is left out; without anything measured there is no chart.
    """
    summaries = [each for each in summaries if _styles([each])]
    if not summaries:
        return
    modes = list(dict.fromkeys(summary["mode"] for summary in summaries))
    styles = _styles(summaries)
    width = 5.2 * len(modes) + 0.6
    columns = max(1, int(width / (0.5 + 0.09 * max(map(len, styles)))))
    legend = 0.25 * (2 + len(styles) // columns)
    panel = 1.5 + 0.11 * len(styles) * len(summaries) / len(modes)
    size = (width, 2 * panel + legend)
    with matplotlib.rc_context({"font.size": 12}):
        figure = Figure(figsize=size, facecolor="white")
        axes = figure.subplots(2, len(modes), squeeze=False)
        for column, mode in enumerate(modes):
            chosen = [summary for summary in summaries if summary["mode"] == mode]
            for row, (title, value) in enumerate(PANELS.items()):
                _draw_panel(axes[row][column], chosen, styles, value)
                axes[row][column].set_title(f"{mode}: {title}")
            axes[1][column].set_xlabel("relative to float32 in JAX")
        lines = [Line2D([], [], linestyle="", **style) for style in styles.values()]
        figure.legend(
            lines, list(styles), loc="lower center", ncols=columns, frameon=False
        )
        figure.tight_layout(rect=(0, legend / size[1], 1, 1))
        figure.savefig(path, dpi=110)


def _styles(summaries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Color and marker of each rival that has anything to show."""
    rivals = {
        name: figures
        for summary in summaries
        for name, figures in summary["rivals"].items()
        if name != BASELINE and any(value(figures) for value in PANELS.values())
    }
    used = dict.fromkeys(COLORS, 0)
    styles = {}
    for name in rivals:
        kind = next(kind for kind in COLORS if name.startswith(kind))
        marker = MARKERS[used[kind]]
        used[kind] += 1
        styles[name] = {"color": COLORS[kind], "marker": marker, "markersize": 8}
    return styles


def _draw_panel(
    axes: Axes,
    summaries: list[dict[str, Any]],
    styles: dict[str, dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
) -> None:
    """One dot for each rival of each subject, the rivals one below the other."""
    shown = [1.0]
    for row, summary in enumerate(summaries):
        for place, (name, style) in enumerate(styles.items()):
            ratio = value(summary["rivals"].get(name, {}))
            if ratio is not None:
                shown.append(ratio)
                axes.plot(ratio, row + 0.8 * (place + 0.5) / len(styles) - 0.4, **style)
        axes.axhline(row + 0.5, color="#dddddd", linewidth=1)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(range(len(summaries)), [s["subject"] for s in summaries])
    axes.set_ylim(len(summaries) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(_ticks(min(shown), max(shown)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _ticks(least: float, most: float) -> list[float]:
    """Powers of two around some ratios, or of fewer of them, or halves between."""
    low, high = math.floor(math.log2(least)), math.ceil(math.log2(most))
    every = math.ceil((high - low) / 7) or 1
    powers = [2.0**power for power in range(low - low % every, high + 1, every)]
    if high - low > 3:
        return powers
    return sorted([*powers, *(1.5 * power for power in powers[:-1])])


def _step_ratio(figures: dict[str, Any]) -> float | None:
    step = figures.get("step_ratio")
    return step["median"] if step else None


def _temporary_ratio(figures: dict[str, Any]) -> float | None:
    return figures.get("temporary_ratio")


PANELS = {"step time": _step_ratio, "temporary memory": _temporary_ratio}
