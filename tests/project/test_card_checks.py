"""The checks for a card, in small: what they compare, and a part that is late."""

import json

import numpy as np
import pytest
import results_file
import training
from card_checks import operations, relative_error, scaling, training_runs
from torch_parity import BY_OP, arguments

pytestmark = pytest.mark.numbers


def last(figures):
    return list(figures)[-1]


def test_loss_scaling_holds_what_is_checked():
    found = last(scaling.part("tiny"))
    checks = ("an_inf_skips_a_step", "scales_are_exact", "nothing_waits")
    assert all(found[check]["holds"] is True for check in checks)


def test_numbers_that_differ_are_counted_and_measured():
    x, y = [np.ones(3), np.zeros(2)], [np.ones(3), np.array([0.0, 3.0])]
    assert scaling.differing(x, y) == 1
    assert not scaling.same_bits(x, y)
    assert scaling.same_bits(x, x)
    assert relative_error(x, y) == pytest.approx(3 / 12**0.5)


def test_runs_in_16_bits_are_held_to_the_spread_of_float32():
    runs = {
        "float32": [{"loss": 1.0}, {"loss": 3.0}],
        "float16": [{"loss": 2.0}, {"loss": 3.5}],
        "bfloat16": [{"loss": 0.5}, {"error": "lost"}],
    }
    compared = training_runs.beside_float32(runs)
    outside = {"float16": [0, 0.5], "bfloat16": [-0.5]}
    assert compared["loss"]["outside"] == outside
    said = training_runs.summary(compared, runs)
    assert said.startswith(
        "lost; loss (spread 2): float16 1 of 2 within, furthest +0.5"
    )


def test_a_recorded_run_tells_its_scales_and_skipped_steps():
    steps = [
        training_runs.Steps(
            {"loss": np.array(4.0)}, (np.array(8.0),), (np.array(False),)
        ),
        training_runs.Steps(
            {"loss": np.array([2.0, 3.0])},
            (np.array([8.0, 4.0]),),
            (np.array([False, True]),),
        ),
        {"accuracy": 0.5},
    ]
    found = training_runs.record(iter(steps))
    assert (found["loss"], found["accuracy"], found["total_steps"]) == (3.0, 0.5, 3)
    assert (found["scales"], found["skipped_steps"]) == ([[(0, 8.0), (2, 4.0)]], [1])


def test_an_op_that_fails_loses_no_other_and_a_wrong_one_is_off():
    inputs = {op: arguments(op, "gpu", "float32") for op in ("mm", "exp")}
    traced = {op: operations.trace(BY_OP[op].fn, inputs[op]) for op in inputs}
    results, errors = operations.run_all({**traced, "exp": None}, inputs)
    assert (list(results), list(errors)) == (["mm"], ["exp"])
    right = [x.astype(np.float64) for x in results["mm"]]
    check = (operations.excess, "mm", "float32", traced["mm"], results["mm"])
    assert check[0](*check[1:], right) == 0
    assert check[0](*check[1:], [1.1 * x for x in right]) > 1
    assert check[0](*check[1:], [np.nan * x for x in right]) == np.inf


def late_or_done(monkeypatch, folder, budget):
    """What the command writes of a part that is given some seconds."""
    monkeypatch.setattr(results_file, "RESULTS", folder)
    training.main(["--only", "scaling", "--size", "tiny", "--budget", str(budget)])
    (path,) = folder.glob("training-tiny-cpu-*.json")
    return json.loads(path.read_text())["figures"]["scaling"]


def test_a_part_that_is_late_is_stopped(monkeypatch, tmp_path):
    found = late_or_done(monkeypatch, tmp_path, 0.1)
    assert found["error"] == "stopped after 0 s"


@pytest.mark.slow
def test_a_part_tells_its_figures_from_a_process_of_its_own(monkeypatch, tmp_path):
    found = late_or_done(monkeypatch, tmp_path, 300)
    assert found["nothing_waits"] == {"holds": True}
    assert found["summary"].startswith("an_inf_skips_a_step: True")
