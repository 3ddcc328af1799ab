"""The unscaling benchmark: in small, on a CPU."""

import functools
import json
import sys

import gradient_trees
import jax
import jax.numpy as jnp
import pytest
import unscale
import unscale_check
from unscale_programs import Budget, Programs

pytestmark = pytest.mark.numbers

TINY = functools.partial(gradient_trees.large_and_tiny, 3)
NO_TIME = "TimeoutError: no time was left to compile it"


def unscaling(monkeypatch, folder, *options):
    """What `benchmarks/unscale.py` writes of small cases on a CPU, without torch."""
    path = folder / "measured.json"
    monkeypatch.setattr(unscale, "MEASURED", path)
    monkeypatch.setattr(unscale, "RESULTS", folder)
    monkeypatch.setattr(unscale, "gpu", lambda: jax.devices()[0])
    monkeypatch.setattr(unscale, "LEAVES", (1,))
    monkeypatch.setattr(unscale, "TREES", {"tiny": TINY})
    monkeypatch.setattr(unscale, "BYTES_READ", 1 << 20)
    monkeypatch.setattr(unscale_check, "CASES", {"large_and_tiny": TINY})
    monkeypatch.setitem(sys.modules, "torch", None)
    other = {"Other": [[1, "triton"]]}
    path.write_text(
        json.dumps({"environment": None, "fastest": other, "figures": None})
    )
    unscale.main(options)
    written = json.loads(path.read_text())
    assert written["fastest"]["Other"] == [[1, "triton"]]
    return written


def test_unscaling_is_timed_beside_what_other_cards_took(monkeypatch, tmp_path):
    written = unscaling(monkeypatch, tmp_path)
    size = gradient_trees.bytes_of(TINY())
    assert written["fastest"]["cpu"] == [[size, "xla"]]
    assert written["environment"]["cpu"]["device"] == "cpu"
    figures = written["figures"]["cpu"]
    checks = {kernel: str(c["cannot_run"]) for kernel, c in figures["checks"].items()}
    assert checks.keys() == {"triton", "mosaic_gpu"}
    assert all("NVIDIA GPU" in reason for reason in checks.values())
    assert [row["case"] for row in figures["cases"]] == ["tiny", "1 MiB"]
    for row in figures["cases"]:
        on_cpus = {"xla", "per_leaf", "all_finite (xla)", "copy"}
        assert set(row["seconds"]) == set(row["of_copy_bandwidth"]) == on_cpus
        assert "needs an NVIDIA GPU" in row["failures"]["triton"]
        assert "torch" in row["failures"]["torch (CUDA graph)"]
        assert row["rounds"] == unscale.ROUNDS
    assert (tmp_path / "unscale-cpu.png").stat().st_size > 10_000


def test_without_time_for_a_program_it_is_a_failure(monkeypatch, tmp_path):
    written = unscaling(monkeypatch, tmp_path, "--budget", "0")
    assert written["fastest"]["cpu"] == []
    for row in written["figures"]["cpu"]["cases"]:
        assert row["failures"]["xla"] == row["failures"]["triton"] == NO_TIME
        assert set(row["seconds"]) == {"copy"}
        assert row["rounds"] == unscale.FEWEST_ROUNDS


def test_a_kernel_whose_first_run_fails_is_not_run_again(monkeypatch):
    monkeypatch.setattr(unscale_check.backends, "why_not", lambda kernel: [])
    monkeypatch.setattr(unscale_check, "TRIAL", "raise SystemExit('no {kernel} here')")
    assert unscale_check.why_not("triton") == ["a first run failed: ['no triton here']"]
    monkeypatch.setattr(unscale_check, "TRIAL", "import time; time.sleep(60)")
    monkeypatch.setattr(unscale_check, "TRIAL_SECONDS", 0.1)
    assert unscale_check.why_not("triton") == ["a first run did not end in 0.1 s"]


def test_a_kernel_is_compared_in_every_bit(monkeypatch):
    cases = {"mixed": gradient_trees.mixed, "large_and_tiny": TINY}
    monkeypatch.setattr(unscale_check, "CASES", cases)

    def off_by_a_bit(leaves, inv_scale):
        first, *others = [leaf * inv_scale.astype(leaf.dtype) for leaf in leaves]
        first = jnp.nextafter(first, jnp.full_like(first, jnp.inf))
        finite = jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]).all()
        return [first, *others], ~finite, finite

    budget = Budget()
    with Programs(budget) as programs:
        for case in cases:
            unscale_check.add_program(programs, "xla", case)
            same = programs.futures["check", "xla", case]
            programs.futures["check", "triton", case] = same
        name = ("check", "mosaic_gpu", "large_and_tiny")
        shapes = (list(TINY().values()), jax.ShapeDtypeStruct((), jnp.float32))
        programs.add(name, off_by_a_bit, *shapes)
        programs.wait()
        runs = {kernel: [] for kernel in unscale_check.backends.KERNELS}
        checks = unscale_check.check_on_card(programs, budget, runs)
    assert checks["triton"] == {"compared": 2 * 4 + 27, "differences": []}
    assert unscale_check.passed(checks["triton"])
    wrong = checks["mosaic_gpu"]
    assert len(wrong["differences"]) == wrong["compared"] == 4 + 27
    assert wrong["cannot_check"] == {"mixed": NO_TIME.removeprefix("TimeoutError: ")}
    partly = {"compared": 1, "differences": [], "cannot_check": {"gpt2": ""}}
    unchecked = {"compared": 0, "differences": []}
    for check in (wrong, partly, unchecked, {"cannot_run": ["no GPU"]}, {}):
        assert not unscale_check.passed(check)
