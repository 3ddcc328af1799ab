"""How large the 16-bit values of a module are, as counts and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jamp._diagnose.measure import LOWEST_EXPONENT

# Of more modules than these, those with findings and the most values are drawn.
_ROWS = 14
# Letters of a module's path beside its row.
_LABEL = 28
# How many powers of 2 beyond the dtype's range are told apart.
_OUTSIDE_SHOWN = 6
_INSIDE, _OUTSIDE, _HARMLESS = "#2f6f9f", "#c8452f", "#e3b6aa"
_NORMAL, _SUBNORMAL = "#e4f0e6", "#faf1d4"
_GRAY = "#555555"


@dataclass(frozen=True)
class Histogram:
    """How large the 16-bit values of a module are, in float32.

    Attributes:
      module: its path, or the function that the values are computed in.
      gradient: whether they are gradients of the scaled loss.
      findings: the kinds of the findings among them.
      counts: how many values have which exponent, beginning with 2^-64; larger and
        smaller ones count at the ends.
    """

    module: str
    gradient: bool
    counts: np.ndarray[Any, Any] = field(compare=False)
    findings: tuple[str, ...] = ()

    @property
    def exponents(self) -> np.ndarray[Any, Any]:
        """The exponents that `counts` counts."""
        return np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + len(self.counts))


def draw(
    path: str | Path,
    title: str,
    dtype: str,
    sides: Sequence[Sequence[Histogram]],
    scales: tuple[float, float, float] | None,
) -> None:
    """Draws histograms beside the range of a dtype.

    Args:
      path: the picture to write.
      title: what stands above it.
      dtype: the dtype.
      sides: the histograms of activations, and those of gradients.
      scales: a loss scale, the smallest and the largest that fit; or None.
    """
    # matplotlib need not be installed for anything else.
    from matplotlib.figure import Figure

    at_fault = any(histogram.findings for side in sides for histogram in side)
    drawn = [side for side in map(_drawn, sides) if side] or [[]]
    rows = max(1, *map(len, drawn))
    size = (1 + 4.8 * len(drawn), 2.4 + 0.5 * rows)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    heights = {"height_ratios": [rows + 0.8, 0.6]}
    grid: Any = figure.subplots(2, len(drawn), squeeze=False, gridspec_kw=heights)
    for axes in grid.flat:
        axes.spines[["top", "right", "left"]].set_visible(False)
    for (axes, below), side in zip(grid.T, drawn, strict=True):
        _draw_histograms(axes, side, dtype, _HARMLESS if at_fault else _OUTSIDE)
        if scales and side and side[0].gradient:
            _draw_window(below, *scales)
        else:
            below.set_axis_off()
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    figure.savefig(path, dpi=150)


def _drawn(histograms: Sequence[Histogram]) -> list[Histogram]:
    """Those with findings and those with the most values, in the program's order."""
    found = [h for h in histograms if h.counts.any()]
    order = sorted(found, key=lambda h: (not h.findings, -h.counts.sum()))
    at_fault = sum(bool(histogram.findings) for histogram in found)
    kept = set(map(id, order[: max(_ROWS, at_fault)]))
    return [histogram for histogram in found if id(histogram) in kept]


def _draw_histograms(
    axes: Any, histograms: Sequence[Histogram], dtype: str, harmless: str
) -> None:
    """One histogram in a row, each as high as its row; the first module on top."""
    info = jnp.finfo(dtype)
    bounds = (info.smallest_subnormal, info.tiny, info.max)
    lowest, normal, high = (float(np.log2(np.float64(bound))) for bound in bounds)
    seen: list[float] = []
    for row, histogram in enumerate(histograms):
        # What is far outside of the dtype's range is at its edge.
        ends = lowest - _OUTSIDE_SHOWN, np.ceil(high) + _OUTSIDE_SHOWN
        shown, place = np.unique(histogram.exponents.clip(*ends), return_inverse=True)
        counts = np.bincount(place, histogram.counts)
        seen += shown[counts > 0].tolist()
        # Roots show small counts, as of values that do not fit.
        heights = -0.85 * np.sqrt(counts / counts.max())
        inside = (shown >= lowest) & (shown < np.ceil(high))
        outside = _OUTSIDE if histogram.findings else harmless
        colors = np.where(inside, _INSIDE, outside)
        axes.bar(shown + 0.5, heights, 1.0, bottom=row + 0.45, color=colors)
        if histogram.findings:
            axes.axhspan(row - 0.45, row + 0.5, fill=False, ec=_OUTSIDE, lw=1.5)
    names = list(map(_label, histograms))
    # A dollar in a name begins no formula.
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    for label, histogram in zip(axes.get_yticklabels(), histograms, strict=True):
        if histogram.findings:
            label.set(color=_OUTSIDE, fontweight="bold")
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    gradient = bool(histograms) and histograms[0].gradient
    kind = "scaled gradients" if gradient else "weights and activations"
    axes.set_title(f"{kind} in {dtype}", fontsize=10, loc="left")
    axes.set_xlabel("magnitude in float32, power of 2", fontsize=9)
    left, right = min(seen, default=0.0), max(seen, default=0.0)
    # An end of the range that is near is shown too.
    left = min(left, max(lowest, left - 16)) - 1
    right = max(right + 1, min(high, right + 16)) + 1
    axes.set_xlim(left, right)
    _draw_range(axes, left, lowest, normal, high, right)


def _draw_range(axes: Any, *edges: float) -> None:
    """Shades what the dtype holds, and says so where there is room."""
    left, lowest, _, high, right = edges
    parts = [
        ("zero", _OUTSIDE, None),
        ("fewer digits", _GRAY, _SUBNORMAL),
        ("all digits", _GRAY, _NORMAL),
        ("inf", _OUTSIDE, None),
    ]
    for (name, color, shade), (start, end) in zip(parts, pairwise(edges), strict=True):
        if shade:
            axes.axvspan(start, end, color=shade, zorder=0, lw=0)
        start, end = max(start, left), min(end, right)
        if end - start > len(name) * (right - left) / 72:
            middle = (start + end) / 2
            axes.text(middle, -0.75, name, color=color, fontsize=8, ha="center")
    for edge in (lowest, high):
        if left < edge < right:
            axes.axvline(edge, color=_OUTSIDE, lw=1, zorder=1)


def _label(histogram: Histogram) -> str:
    name = histogram.module
    longest = max(name.split("/"), key=len)
    kept = max(_LABEL - len(name) + len(longest) - 3, 8)
    if len(name) > _LABEL and len(longest) > kept + 3:
        # The other names tell it from modules of the same kind.
        ends = longest[: kept // 2], longest[-kept // 2 :]
        name = name.replace(longest, "...".join(ends), 1)
    short = name if len(name) <= _LABEL else f"...{name[3 - _LABEL :]}"
    kinds = ", ".join(histogram.findings)
    return f"{kinds} \u25b6 {short}" if kinds else short


def _draw_window(axes: Any, scale: float, *window: float) -> None:
    axes.set_yticks([])
    axes.set_xlabel("loss scale, power of 2", fontsize=9)
    low, high = np.log2(window)
    here = np.log2(scale)
    if low <= high:
        axes.axvspan(low, high, color=_NORMAL, lw=0)
        axes.text((low + high) / 2, 0.62, "fits", fontsize=8, color=_GRAY, ha="center")
    fits = low <= here <= high
    axes.plot([here], [0.3], "o", color=_INSIDE if fits else _OUTSIDE, ms=7)
    axes.set_ylim(0, 1)
    axes.set_xlim(min(low, high, here) - 2, max(low, high, here) + 2)
