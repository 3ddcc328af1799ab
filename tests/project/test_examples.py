"""The short examples run, and show what they say."""

import accumulation
import checkpointing
import clipping
import custom_functions
import distributed
import gradient_penalty
import jax
import multi_process
import numpy as np
import plain_loop
import pytest
import training_fp16
import training_nnx
import two_models

pytestmark = pytest.mark.once


@pytest.mark.parametrize("example", [training_fp16, training_nnx, plain_loop])
def test_a_model_learns_in_float16(example):
    result = example.main()
    assert result["last"] < result["first"] / 5


def test_steps_are_skipped_until_the_scale_has_come_down(capsys):
    result = training_fp16.main(num_steps=20)
    assert 0 < result["skipped"] < 15
    assert (
        capsys.readouterr().out.count("skipped, the scale is now")
        == (result["skipped"])
    )


def test_clipped_steps_do_not_depend_on_the_scale():
    assert max(clipping.main().values()) < 1e-6


def test_an_overflow_in_one_micro_batch_skips_the_batch_and_no_other():
    result = accumulation.main()
    assert result["skipped"] == [7]
    assert result["last"] < result["first"]


def test_a_gradient_penalty_in_float16_comes_out_as_in_float32():
    result = gradient_penalty.main()
    assert result["float16"] == pytest.approx(result["float32"], rel=0.02)


def test_of_two_models_only_the_one_that_overflows_skips():
    result = two_models.main()
    assert result["skipped"] == [(20, "sgd")]
    for name in ("adam", "sgd"):
        assert result[name][-1] < result[name][0] / 2


def test_a_function_in_float32_is_exact_under_autocast(capsys):
    gradients = custom_functions.main()
    # Beside it stands a product that is rounded; its gradient is at most 0.05.
    np.testing.assert_allclose(gradients["float16"], gradients["float32"], atol=5e-5)
    printed = capsys.readouterr().out
    assert "float16 x float16" in printed
    assert "float32 x float32" in printed


def test_a_resumed_run_is_bit_identical():
    assert checkpointing.main()


def test_all_ways_of_sharding_train_alike():
    results = distributed.main()
    losses = [result.loss for result in results.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.01)
    for result in results.values():
        assert result.skipped == 1
        for leaf in jax.tree.leaves(result.params):
            assert len(leaf.sharding.device_set) == len(jax.devices())
    whole, part, same_part = (result.bytes_per_device for result in results.values())
    assert part == same_part
    assert part < whole / 7  # of 8 devices; the counters are on each


def test_two_processes_skip_together_and_end_up_equal():
    first, second = multi_process.main(["--steps", "20"])
    assert first == second
    assert first["processes"] == 2
    assert first["skipped"] == 1
    assert first["last"] < first["first"]
