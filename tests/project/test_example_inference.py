"""What the example of inference stores can be loaded and run, with JAX alone."""

import subprocess
import sys

import inference
import pytest

pytestmark = pytest.mark.once

CONSUMER = f"""
import sys
from pathlib import Path
import numpy as np
from flax import serialization
from jax import export

folder = Path(sys.argv[1])
program = export.deserialize(bytearray((folder / "{inference.PROGRAM}").read_bytes()))
weights = serialization.msgpack_restore((folder / "{inference.WEIGHTS}").read_bytes())
for size in (1, 3):
    logits = program.call(weights, np.zeros((size, *{inference.IMAGE}), np.float32))
    assert logits.shape == (size, 10)
    assert np.isfinite(logits).all()
assert "jamp" not in sys.modules
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    return inference.main(["--epochs", "2", "--folder", str(folder)]), folder


def test_the_program_computes_in_16_bits(stored):
    result, _ = stored
    assert result.low_flop_share == 1
    assert result.accuracy["float32"] > 0.8


def test_weights_in_16_bits_are_half_as_large_and_predict_the_same(stored):
    result, _ = stored
    assert result.identical
    # 16 bits have 8 of them for the digits.
    assert result.difference < 2 * 2.0**-8
    assert result.accuracy["bfloat16"] == result.accuracy["float32"]
    assert result.weight_bytes["bfloat16"] < 0.51 * result.weight_bytes["float32"]


def test_who_loads_the_program_does_not_need_jamp(stored):
    _, folder = stored
    subprocess.run([sys.executable, "-c", CONSUMER, str(folder)], check=True)
