"""What `watching` shows of a run: on a terminal, elsewhere and as a picture."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
import watching
from rich.console import Console

pytestmark = pytest.mark.once

STEPS = WIDTH = 80
OVERFLOW_IN_STEP = 40


def scalars(step):
    """A loss that falls, with one overflow, after which the scale is halved."""
    overflows = step == OVERFLOW_IN_STEP
    return {
        "loss": jnp.float32(np.nan if overflows else 4 - step / 40),
        "loss_scale": jnp.float32(2.0**12 if step <= OVERFLOW_IN_STEP else 2.0**11),
        "grad_norm": jnp.float32(np.inf if overflows else 1),
    }


def watched(terminal):
    """A watched run, and what it has written."""
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=WIDTH + 4, height=30
    )
    with watching.Watch("run", STEPS, console) as watch:
        for step in range(STEPS):
            watch.log(scalars(step))
    return watch, console.file.getvalue()


def test_elsewhere_than_on_a_terminal_ten_lines_are_printed():
    _, written = watched(terminal=False)
    lines = written.splitlines()
    assert len(lines) == 10
    assert lines[0] == "run: step 8/80, loss 3.825, scale 2^12, 0 skipped"
    assert lines[-1] == "run: step 80/80, loss 2.025, scale 2^11, 1 skipped"


def test_every_step_is_recorded():
    watch, _ = watched(terminal=False)
    assert len(watch.losses) == len(watch.scales) == STEPS
    assert np.flatnonzero(watch.skipped).tolist() == [OVERFLOW_IN_STEP]


def test_on_a_terminal_a_panel_is_drawn():
    watch, written = watched(terminal=True)
    assert "step 80/80, loss 2.025, scale 2^11, 1 skipped" in written
    console = Console(file=io.StringIO(), width=WIDTH + 4)
    console.print(watch.panel())
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {WIDTH + 4}
    (marks,) = (line for line in lines if set(line) == {"│", "x", " "})
    assert marks.index("x") == 2 + OVERFLOW_IN_STEP


def test_a_scale_that_is_not_used_is_not_drawn():
    watch = watching.Watch("run", 2, Console(file=io.StringIO(), width=WIDTH + 4))
    with watch:
        for step in range(2):
            watch.log(scalars(step) | {"loss_scale": jnp.float32(1)})
    assert not watch.has_scale
    console = Console(file=io.StringIO(), width=WIDTH + 4)
    console.print(watch.panel())
    assert "loss scale" not in console.file.getvalue()


def test_an_error_in_the_run_is_not_hidden():
    with pytest.raises(RuntimeError, match="in a step"):
        with watching.Watch("run", STEPS, Console(file=io.StringIO())) as watch:
            watch.log(scalars(0))
            raise RuntimeError("in a step")


@pytest.mark.parametrize(
    ("heights", "drawn"),
    [
        ([0.0, 1.0, 2.0, 3.0], "▁▃▆█"),
        ([5.0, 5.0], "▁▁"),
        ([1.0, np.nan, 2.0, np.inf], "▁███"),
        ([np.nan], "█"),
    ],
)
def test_bars_are_as_high_as_their_numbers(heights, drawn):
    assert watching.bars(np.array(heights), rows=1) == drawn


def test_bars_of_several_rows_are_filled_from_below():
    assert watching.bars(np.array([0.0, 0.5, 1.0]), rows=2) == " ▁█\n▁██"


def test_columns_are_no_more_than_there_are_values():
    assert watching.columns([1, 2, 3], 10, np.mean).tolist() == [1, 2, 3]
    assert watching.columns([1, 3, 5, 7], 2, np.mean).tolist() == [2, 6]


def test_a_picture_is_drawn(tmp_path):
    runs = {name: watched(terminal=False)[0] for name in ("one", "two")}
    watching.save_figure(runs, "Two runs", tmp_path / "new" / "runs.png")
    assert (tmp_path / "new" / "runs.png").read_bytes().startswith(b"\x89PNG")
