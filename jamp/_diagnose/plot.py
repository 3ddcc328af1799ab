"""The picture of a diagnosis: how large values are, beside what the dtype holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jamp._diagnose.findings import Findings, Histogram

# Of more modules than these, those with the most values are drawn.
_ROWS = 14
# How many powers of 2 beyond the dtype's range are told apart.
_OUTSIDE_SHOWN = 6
_INSIDE, _OUTSIDE = "#2f6f9f", "#c8452f"
_NORMAL, _SUBNORMAL = "#e4f0e6", "#faf1d4"
_GRAY = "#555555"


def save_plot(diagnosis: Findings, path: str | Path) -> None:
    """Draws a diagnosis; see `Diagnosis.plot`."""
    # matplotlib need not be installed for anything else.
    from matplotlib.figure import Figure

    sides = [_largest(diagnosis, gradient) for gradient in (False, True)]
    sides = [histograms for histograms in sides if histograms] or [[]]
    rows = max(1, *map(len, sides))
    figure = Figure(
        figsize=(1 + 4.8 * len(sides), 2.4 + 0.5 * rows),
        layout="constrained",
        facecolor="white",
    )
    grid: Any = figure.subplots(
        2,
        len(sides),
        squeeze=False,
        gridspec_kw={"height_ratios": [rows + 0.8, 0.6]},
    )
    for column, histograms in enumerate(sides):
        axes, below = grid[:, column]
        _draw_histograms(axes, histograms, diagnosis)
        axes.set_xlim(*_limits(histograms, diagnosis))
        _draw_range(axes, diagnosis)
        if histograms and histograms[0].gradient:
            _draw_window(below, diagnosis)
        else:
            below.set_axis_off()
    figure.suptitle(_title(diagnosis), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _title(diagnosis: Findings) -> str:
    state = "healthy" if diagnosis.healthy else str(diagnosis.findings[0].message)
    return f"{diagnosis.header}\n{state}"


def _largest(diagnosis: Findings, gradient: bool) -> list[Histogram]:
    """The histograms with the most values, in the program's order."""
    found = [h for h in diagnosis.histograms if h.gradient is gradient]
    found = [h for h in found if h.counts.any()]
    kept = set(sorted(range(len(found)), key=lambda i: -found[i].counts.sum())[:_ROWS])
    return [histogram for index, histogram in enumerate(found) if index in kept]


def _bounds(diagnosis: Findings) -> tuple[float, float, float]:
    """Exponents of the smallest subnormal, the smallest normal, the largest number."""
    info = jnp.finfo(diagnosis.dtype)
    bounds = (info.smallest_subnormal, info.tiny, info.max)
    lowest, normal, high = (float(np.log2(np.float64(bound))) for bound in bounds)
    return lowest, normal, high


def _folded(histogram: Histogram, diagnosis: Findings) -> tuple[Any, Any]:
    """Exponents and counts; what is far outside of the dtype's range is at its edge."""
    lowest, _, high = _bounds(diagnosis)
    exponents, counts = histogram.exponents, histogram.counts
    near = np.clip(exponents, lowest - _OUTSIDE_SHOWN, np.ceil(high) + _OUTSIDE_SHOWN)
    shown = np.unique(near)
    return shown, np.array([counts[near == exponent].sum() for exponent in shown])


def _limits(
    histograms: Sequence[Histogram], diagnosis: Findings
) -> tuple[float, float]:
    """Exponents to show: those there are, and an end of the range that is near."""
    lowest, _, high = _bounds(diagnosis)
    seen = [
        exponents[counts > 0]
        for exponents, counts in (_folded(h, diagnosis) for h in histograms)
    ]
    left = min((float(exponents.min()) for exponents in seen), default=0.0)
    right = max((float(exponents.max()) for exponents in seen), default=0.0)
    left = min(left, max(lowest, left - 16)) - 1
    right = max(right + 1, min(high, right + 16)) + 1
    return left, right


def _draw_range(axes: Any, diagnosis: Findings) -> None:
    """Shades what the dtype holds, and says so where there is room."""
    lowest, normal, high = _bounds(diagnosis)
    axes.axvspan(normal, high, color=_NORMAL, zorder=0, lw=0)
    axes.axvspan(lowest, normal, color=_SUBNORMAL, zorder=0, lw=0)
    left, right = axes.get_xlim()
    named = [
        ("zero", left, lowest, _OUTSIDE),
        ("fewer digits", lowest, normal, _GRAY),
        ("all digits", normal, high, _GRAY),
        ("inf", high, right, _OUTSIDE),
    ]
    for name, start, end, color in named:
        start, end = max(start, left), min(end, right)
        if end - start > len(name) * (right - left) / 72:
            middle = (start + end) / 2
            axes.text(middle, -0.75, name, color=color, fontsize=8, ha="center")
    for edge in (lowest, high):
        if left < edge < right:
            axes.axvline(edge, color=_OUTSIDE, lw=1, zorder=1)


def _draw_histograms(
    axes: Any, histograms: Sequence[Histogram], diagnosis: Findings
) -> None:
    """One histogram in a row, each as high as its row; the first module on top."""
    lowest, _, high = _bounds(diagnosis)
    for row, histogram in enumerate(histograms):
        exponents, counts = _folded(histogram, diagnosis)
        # Roots show small counts, as of values that do not fit.
        heights = -0.85 * np.sqrt(counts / counts.max())
        inside = (exponents >= lowest) & (exponents < np.ceil(high))
        colors = np.where(inside, _INSIDE, _OUTSIDE)
        axes.bar(exponents + 0.5, heights, 1.0, bottom=row + 0.45, color=colors)
    names = [_short(histogram.module) for histogram in histograms]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    gradient = bool(histograms) and histograms[0].gradient
    kind = "scaled gradients" if gradient else "weights and activations"
    axes.set_title(f"{kind} in {diagnosis.dtype}", fontsize=10, loc="left")
    axes.set_xlabel("magnitude in float32, power of 2", fontsize=9)


def _draw_window(axes: Any, diagnosis: Findings) -> None:
    """The loss scales that keep gradients in range, and the one that there is."""
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("loss scale, power of 2", fontsize=9)
    if diagnosis.scale_window is None or diagnosis.loss_scale is None:
        axes.set_axis_off()
        return
    low, high = np.log2(diagnosis.scale_window)
    here = np.log2(diagnosis.loss_scale)
    if low <= high:
        axes.axvspan(low, high, color=_NORMAL, lw=0)
        axes.text((low + high) / 2, 0.62, "fits", fontsize=8, color=_GRAY, ha="center")
    fits = low <= here <= high
    axes.plot([here], [0.3], "o", color=_INSIDE if fits else _OUTSIDE, ms=7)
    axes.set_ylim(0, 1)
    axes.set_xlim(min(low, high, here) - 2, max(low, high, here) + 2)


def _short(module: str) -> str:
    return module if len(module) <= 28 else f"...{module[-25:]}"
