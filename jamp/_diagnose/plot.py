"""The picture of a diagnosis: how large values are, beside what the dtype holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


def save_plot(
    path: str | Path,
    title: str,
    dtype: str,
    histograms: Sequence[Histogram],
    loss_scale: float | None,
    window: tuple[float, float] | None,
) -> None:
    # matplotlib need not be installed for anything else.
    from matplotlib.figure import Figure

    sides = [_drawn(histograms, gradient) for gradient in (False, True)]
    sides = [side for side in sides if side] or [[]]
    rows = max(1, *map(len, sides))
    findings = any(histogram.findings for histogram in histograms)
    size = (1 + 4.8 * len(sides), 2.4 + 0.5 * rows)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid: Any = figure.subplots(
        2, len(sides), squeeze=False, gridspec_kw={"height_ratios": [rows + 0.8, 0.6]}
    )
    for column, side in enumerate(sides):
        axes, below = grid[:, column]
        _draw_histograms(axes, side, dtype, _HARMLESS if findings else _OUTSIDE)
        axes.set_xlim(*_limits(side, dtype))
        _draw_range(axes, dtype)
        if side and side[0].gradient and window is not None and loss_scale is not None:
            _draw_window(below, loss_scale, window)
        else:
            below.set_axis_off()
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _drawn(histograms: Sequence[Histogram], gradient: bool) -> list[Histogram]:
    """Those with findings and those with the most values, in the program's order."""
    found = [h for h in histograms if h.gradient is gradient and h.counts.any()]
    order = sorted(found, key=lambda h: (not h.findings, -h.counts.sum()))
    at_fault = sum(bool(histogram.findings) for histogram in found)
    kept = set(map(id, order[: max(_ROWS, at_fault)]))
    return [histogram for histogram in found if id(histogram) in kept]


def _bounds(dtype: str) -> tuple[float, float, float]:
    """Exponents of the smallest subnormal, the smallest normal, the largest number."""
    info = jnp.finfo(dtype)
    bounds = (info.smallest_subnormal, info.tiny, info.max)
    lowest, normal, high = (float(np.log2(np.float64(bound))) for bound in bounds)
    return lowest, normal, high


def _folded(histogram: Histogram, dtype: str) -> tuple[Any, Any]:
    """Exponents and counts; what is far outside of the dtype's range is at its edge."""
    lowest, _, high = _bounds(dtype)
    exponents, counts = histogram.exponents, histogram.counts
    near = np.clip(exponents, lowest - _OUTSIDE_SHOWN, np.ceil(high) + _OUTSIDE_SHOWN)
    shown = np.unique(near)
    return shown, np.array([counts[near == exponent].sum() for exponent in shown])


def _limits(histograms: Sequence[Histogram], dtype: str) -> tuple[float, float]:
    """Exponents to show: those there are, and an end of the range that is near."""
    lowest, _, high = _bounds(dtype)
    seen = [
        exponents[counts > 0]
        for exponents, counts in (_folded(h, dtype) for h in histograms)
    ]
    left = min((float(exponents.min()) for exponents in seen), default=0.0)
    right = max((float(exponents.max()) for exponents in seen), default=0.0)
    left = min(left, max(lowest, left - 16)) - 1
    right = max(right + 1, min(high, right + 16)) + 1
    return left, right


def _draw_range(axes: Any, dtype: str) -> None:
    """Shades what the dtype holds, and says so where there is room."""
    lowest, normal, high = _bounds(dtype)
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
    axes: Any, histograms: Sequence[Histogram], dtype: str, harmless: str
) -> None:
    """One histogram in a row, each as high as its row; the first module on top."""
    lowest, _, high = _bounds(dtype)
    for row, histogram in enumerate(histograms):
        exponents, counts = _folded(histogram, dtype)
        # Roots show small counts, as of values that do not fit.
        heights = -0.85 * np.sqrt(counts / counts.max())
        inside = (exponents >= lowest) & (exponents < np.ceil(high))
        outside = _OUTSIDE if histogram.findings else harmless
        colors = np.where(inside, _INSIDE, outside)
        axes.bar(exponents + 0.5, heights, 1.0, bottom=row + 0.45, color=colors)
        if histogram.findings:
            axes.axhspan(row - 0.45, row + 0.5, fill=False, ec=_OUTSIDE, lw=1.5)
    names = list(map(_label, histograms))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for label, histogram in zip(axes.get_yticklabels(), histograms, strict=True):
        if histogram.findings:
            label.set(color=_OUTSIDE, fontweight="bold")
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    gradient = bool(histograms) and histograms[0].gradient
    kind = "scaled gradients" if gradient else "weights and activations"
    axes.set_title(f"{kind} in {dtype}", fontsize=10, loc="left")
    axes.set_xlabel("magnitude in float32, power of 2", fontsize=9)


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


def _draw_window(axes: Any, scale: float, window: tuple[float, float]) -> None:
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
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
