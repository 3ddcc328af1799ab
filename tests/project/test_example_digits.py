"""The example runs, and autocast costs it no accuracy."""

import digits
import pytest

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    return tmp_path_factory.mktemp("digits") / "losses.png"


@pytest.fixture(scope="module")
def results(figure):
    with pytest.MonkeyPatch.context() as patch:
        # Training a smaller network takes a fraction of the time.
        patch.setattr(digits, "MODEL", digits.DigitNet((16, 32), hidden=256))
        return digits.main(["--quick", "--figure", str(figure)])


def test_both_runs_learn_and_agree_on_accuracy(results):
    float32, autocast = results["float32"].accuracy, results["autocast"].accuracy
    assert min(float32, autocast) > 0.9
    assert abs(float32 - autocast) <= 0.01


def test_autocast_runs_the_model_in_16_bits(results):
    assert results["float32"].low_flop_share == 0
    assert results["autocast"].low_flop_share > 0.9


def test_it_says_whether_to_look_at_the_time(results):
    float32 = results["float32"]._replace(step_seconds=2.0)
    runs = {"float32": float32, "autocast": float32._replace(step_seconds=1.0)}
    assert "not what to look at" in digits.what_it_shows(runs, slow=True)
    assert "0.50 of float32's time here: a gain" in digits.what_it_shows(runs, False)
    runs["autocast"] = float32._replace(step_seconds=3.0)
    assert "1.50 of float32's time here: no gain" in digits.what_it_shows(runs, False)


def test_loss_curves_are_drawn(results, figure):
    assert figure.read_bytes().startswith(b"\x89PNG")
