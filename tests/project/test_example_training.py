"""The examples that train a whole model do so, in 16 bits as in float32."""

import char_transformer
import gan
import jax
import lstm
import numpy as np
import pytest
import resnet

pytestmark = pytest.mark.once


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_transformer_learns_letters_in_float16_as_in_float32(tmp_path, capsys):
    figure = tmp_path / "runs.png"
    short = ["--steps", "30", "--depth", "1", "--letters", "20"]
    runs = char_transformer.main([*short, "--figure", str(figure)])
    last = {name: np.mean(run.losses[-10:]) for name, run in runs.items()}
    guessing = np.log(len(char_transformer.ALPHABET))
    assert last["float32"] < 0.7 * guessing
    assert last["float16"] == pytest.approx(last["float32"], rel=0.05)
    # The scale begins too high and comes down step by step.
    skipped = np.flatnonzero(runs["float16"].skipped)
    assert 0 < len(skipped) < 15
    assert runs["float16"].scales[-1] < 2.0**24
    assert not any(runs["float32"].skipped)
    assert is_png(figure)
    assert "The basic import statement" in capsys.readouterr().out


def test_a_resnet_learns_in_float16_as_in_float32(monkeypatch):
    # A stage less, which leaves each kind of layer in it.
    monkeypatch.setattr(resnet, "MODEL", resnet.ResNet(stages=((32, 2),)))
    results = resnet.main(["--epochs", "6"])
    float32, float16 = results["float32"], results["float16"]
    for result in (float32, float16):
        assert result.losses[-5:].mean() < result.losses[:5].mean() / 2
        # Weights, BatchNorm's statistics and the optimizer's state.
        assert result.dtypes == {"float32"}
    assert float16.accuracy == pytest.approx(float32.accuracy, abs=0.05)


@pytest.fixture(scope="module")
def adders(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("lstm")
    with pytest.MonkeyPatch.context() as patch:
        # Of a smaller network the steps take an eighth of the time.
        patch.setattr(lstm, "BATCH_SIZE", 16)
        patch.setattr(lstm, "HIDDEN", 32)
        return lstm.main(["--steps", "200", "--logdir", str(logdir)]), logdir


def test_an_lstm_learns_in_float16_as_in_float32(adders):
    runs, _ = adders
    for metrics in runs.values():
        assert len(metrics["loss"]) == 200
        assert metrics["loss"][-20:].mean() < 0.1  # guessing gives 0.167
    assert (runs["float32"]["loss_scale"] == 1).all()
    assert runs["float16"]["loss_scale"][-1] > 2.0**10


def test_metrics_are_written_for_tensorboard(adders):
    runs, logdir = adders
    for name, metrics in runs.items():
        (events,) = (logdir / name).iterdir()
        written = events.read_bytes()
        for metric in metrics:
            assert metric.encode() in written


def test_a_gan_learns_what_digits_look_like(tmp_path):
    figure = tmp_path / "drawn.png"
    result = gan.main(["--epochs", "20", "--figure", str(figure)])
    before, after = result.distances
    assert after < 0.7 * before
    for state in result.players:
        assert 0 < state.opt_state.skipped_steps < 20
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {
            "float32"
        }
    assert is_png(figure)
