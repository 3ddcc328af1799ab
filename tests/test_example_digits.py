"""The example runs, and autocast costs it no accuracy."""

import digits
import pytest

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    return tmp_path_factory.mktemp("digits") / "losses.png"


@pytest.fixture(scope="module")
def results(figure):
    return digits.main(["--quick", "--figure", str(figure)])


def test_both_runs_learn_and_agree_on_accuracy(results):
    float32, autocast = results["float32"].accuracy, results["autocast"].accuracy
    assert min(float32, autocast) > 0.9
    assert abs(float32 - autocast) <= 0.01


def test_autocast_runs_the_model_in_16_bits(results):
    assert results["float32"].low_flop_share == 0
    assert results["autocast"].low_flop_share > 0.9


def test_loss_curves_are_drawn(results, figure):
    assert figure.read_bytes().startswith(b"\x89PNG")
