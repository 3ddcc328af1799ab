"""Watching a training run: live in the terminal, and as a picture at the end.

A `Watch` takes the scalars of each step, as `jamp.metrics` gives them. It reads them
one step late, while the device is at the next step, which has to wait for nothing.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"


class Watch:
    """Shows the loss and the loss scale of one training run.

    On a terminal it draws a panel that changes as the run goes on, elsewhere it prints
    a line ten times a run. Use it in a `with` statement.

    Attributes:
      losses: the loss of every step.
      scales: the loss scale of every step.
      skipped: for every step, whether it was skipped because a gradient overflowed.
    """

    def __init__(self, title: str, num_steps: int, console: Console | None = None):
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self._title = title
        self._num_steps = num_steps
        self._console = console or Console(highlight=False)
        self._live = Live(get_renderable=self.panel, console=self._console)
        self._unread: dict[str, jax.Array] | None = None

    def __enter__(self) -> "Watch":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._read()
        self._live.stop()

    def log(self, scalars: dict[str, jax.Array]) -> None:
        """Takes `loss`, `loss_scale` and `grad_norm` of a step."""
        self._read()
        self._unread = scalars

    def _read(self) -> None:
        if self._unread is None:
            return
        self.scales.append(float(self._unread["loss_scale"]))
        self.skipped.append(not math.isfinite(self._unread["grad_norm"]))
        # Last: the panel is drawn by another thread, once there is a loss.
        self.losses.append(float(self._unread["loss"]))
        self._unread = None
        step, every = len(self.losses), max(1, self._num_steps // 10)
        if not self._console.is_terminal and step % every == 0:
            self._console.print(f"{self._title}: {self.summary()}", soft_wrap=True)

    def summary(self) -> str:
        """The last step in a line."""
        if not self.losses:
            return "compiling"
        line = f"step {len(self.losses)}/{self._num_steps}, loss {self.losses[-1]:.3f}"
        if not self.has_scale:
            return line
        scale = power_of_two(self.scales[-1])
        return f"{line}, scale {scale}, {sum(self.skipped)} skipped"

    @property
    def has_scale(self) -> bool:
        """Whether the loss has been scaled."""
        return any(scale != 1 for scale in self.scales)

    def panel(self) -> Panel:
        """The run so far, as wide as the terminal."""
        width = self._console.width - 4
        lines = [Text(self.summary())]
        if self.losses:
            losses = columns(self.losses, width, np.mean)
            lines += [Text("loss", style="dim"), Text(bars(losses, 8), style="cyan")]
        if self.has_scale:
            exponents = columns(np.log2(self.scales), width, np.mean)
            skipped = columns(self.skipped, width, np.any)
            lines += [
                Text("log2 of the loss scale; x: a skipped step", style="dim"),
                Text(bars(exponents, 4), style="yellow"),
                Text("".join("x" if flag else " " for flag in skipped), style="red"),
            ]
        return Panel(Group(*lines), title=self._title, title_align="left")


def power_of_two(value: float) -> str:
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{value:g}"


def columns(values: Sequence, width: int, combine: Callable) -> np.ndarray:
    """Values combined into so many columns of nearly equal size, or fewer."""
    parts = np.array_split(values, min(width, len(values)))
    return np.array([combine(part) for part in parts])


def bars(heights: np.ndarray, rows: int) -> str:
    """A bar for each height, drawn with block characters; full if it is not finite."""
    finite = heights[np.isfinite(heights)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    share = np.ones(len(heights))
    share[np.isfinite(heights)] = (finite - low) / max(high - low, 1e-30)
    eighths = 1 + np.round(share * (8 * rows - 1)).astype(int)
    return "\n".join(
        "".join(BLOCKS[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        for row in reversed(range(rows))
    )


def save_figure(runs: dict[str, Watch], title: str, path: Path) -> None:
    """Draws the losses of both runs, and below them the scales if they have one."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    looks = [("tab:blue", 4.0, "-"), ("tab:red", 1.5, "--")]
    for (name, run), (color, width, dashes) in zip(runs.items(), looks, strict=True):
        steps = np.arange(1, len(run.losses) + 1)
        window = min(20, len(steps))
        smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        middles = np.arange(len(smooth)) + (window + 1) / 2
        top.plot(steps, run.losses, color=color, alpha=0.25, lw=1)
        top.plot(middles, smooth, dashes, color=color, lw=width, label=name)
        if run.has_scale:
            skipped = np.flatnonzero(run.skipped)
            bottom.step(steps, run.scales, where="post", color=color, label=name)
            bottom.plot(
                steps[skipped],
                np.array(run.scales)[skipped],
                "xk",
                label=f"{len(skipped)} skipped steps",
            )
            bottom.legend(frameon=False)
    top.set(ylabel="loss", title=title)
    top.legend(title=f"mean of {window} steps; faint: every step", frameon=False)
    bottom.set(xlabel="training step", ylabel="loss scale")
    bottom.set_yscale("log", base=2)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
