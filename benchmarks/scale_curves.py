"""Draws how the loss scale of each example went, from what `training.py` wrote."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

COLORS = ("#0060b0", "#d55e00", "#009e73")  # one for each seed
DASHES = ("-", "--")  # one for each optimizer
COLUMNS = 3


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws a panel for each example whose scale changes; nothing without one.

    Args:
      figures: the parts of `training.py` by name, of which those of examples have the
        steps at which the scale of a run changed.
      path: the file of the chart.
    """
    scaled = {
        name.removeprefix("run_").replace("_", " "): runs
        for name, found in figures.items()
        if (runs := [run for run in _in_float16(found) if _changes(run)])
    }
    if not scaled:
        return
    rows = math.ceil(len(scaled) / COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 2.7 * rows), layout="constrained")
    panels = [*figure.subplots(rows, COLUMNS, squeeze=False).flat]
    for axes, (name, runs) in zip(panels, scaled.items(), strict=False):
        for color, run in zip(COLORS, runs, strict=False):
            for dashes, changes in zip(DASHES, run["scales"], strict=False):
                steps, scales = zip(*changes, strict=True)
                axes.step(
                    [*steps, run["total_steps"]],
                    [math.log2(scale) for scale in (*scales, scales[-1])],
                    dashes,
                    where="post",
                    color=color,
                    linewidth=1.3,
                )
        axes.set_title(name)
        axes.yaxis.set_major_locator(MultipleLocator(1))
        axes.yaxis.set_major_formatter("$2^{{{x:g}}}$")
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(scaled) :]:
        axes.set_visible(False)
    figure.supxlabel("training step")
    figure.supylabel("loss scale")
    figure.savefig(path, dpi=110, facecolor="white")


def _in_float16(found: dict[str, Any]) -> list[dict[str, Any]]:
    return list(found.get("runs", {}).get("float16", []))


def _changes(run: dict[str, Any]) -> bool:
    return any(len(changes) > 1 for changes in run.get("scales", []))
