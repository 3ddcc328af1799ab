"""The step benchmark: on what is known by hand, and in small."""

import json
import re
import time

import jax
import jax.numpy as jnp
import measuring
import networks
import numpy as np
import program_figures
import pytest
import results_file
import step_summary
import steps
from jaxprs import equations
from measuring import Comparison, Plan
from rich.console import Console
from rivals.flax_program import FlaxProgram
from rivals.flax_rivals import FlaxRival, flax_rivals
from subjects import OTHERS, SUBJECTS, make_subject

pytestmark = pytest.mark.numbers

X, W = np.ones((4, 3), np.float32), np.ones((3, 5), np.float32)
BF16 = jnp.bfloat16

# What a rival that trains has to show.
TRAINING_FIGURES = {
    "casts_in_jaxpr",
    "casts_in_hlo",
    "temporary_bytes",
    "temporary_ratio",
    "residual_bytes",
    "residual_ratio",
    "lowering_ratio",
    "compile_ratio",
    "step_ratio",
}
INFERENCE_FIGURES = TRAINING_FIGURES - {"residual_bytes", "residual_ratio"}


def square_of_view(w, x):
    y = jnp.exp(w)
    return y.T * y.reshape(5, 3)


# Functions of (w, x), and what differentiating their sum at w saves.
SAVING = {
    "the arguments": (lambda w, x: x @ w, {}),
    "a cosine": (lambda w, x: jnp.sin(x @ w), {"float32": 4 * 4 * 5}),
    "a cast and a cosine": (
        lambda w, x: jnp.sin(x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32),
        {"bfloat16": 2 * (4 * 3 + 4 * 5)},
    ),
    "one buffer, in two views": (square_of_view, {"float32": 4 * 3 * 5}),
    "a buffer from an inner jit": (
        lambda w, x: jax.jit(lambda y: jnp.exp(y))(w),
        {"float32": 4 * 3 * 5},
    ),
    "two buffers from one inner jit": (
        lambda w, x: jax.jit(jnp.exp)(jax.jit(jnp.exp)(w)),
        {"float32": 2 * 4 * 3 * 5},
    ),
    "an argument through an inner jit": (
        lambda w, x: w.T @ jax.jit(jnp.transpose)(x),
        {},
    ),
    "a constant": (lambda w, x: w * jnp.full((3, 5), 2.0).astype(BF16), {}),
    "a mask": (lambda w, x: jax.nn.relu(w), {"bool": 3 * 5}),
}


@pytest.mark.parametrize("name", SAVING)
def test_residuals_are_those_known_by_hand(name):
    fn, expected = SAVING[name]
    saved = program_figures.saved_for_backward(
        lambda w, x: (fn(w, x).sum(), None), W, X
    )
    assert program_figures.bytes_saved(saved) == {
        **expected,
        "total": sum(expected.values()),
    }


def test_residuals_come_with_the_line_that_made_them():
    (saved,) = program_figures.saved_for_backward(
        lambda w, x: (jnp.sin(w).sum(), None), W, X
    )
    assert saved.shape == W.shape
    assert saved.eqn.primitive.name == "cos"
    assert program_figures.lines(saved.eqn)[0].startswith("test_benchmarks.py:")


def test_casts_of_a_jaxpr_are_counted_in_inner_programs_too():
    def fn(x):
        return jax.jit(lambda y: y.astype(BF16))(x).astype(jnp.float32)

    assert program_figures.casts_in_jaxpr(jax.make_jaxpr(fn)(X)) == 2


def test_a_conversion_to_the_same_dtype_is_no_cast():
    jaxpr = jax.make_jaxpr(lambda number: jnp.asarray(number, jnp.float32))(1.0)
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert names == ["convert_element_type"]  # it was weakly typed
    assert program_figures.casts_in_jaxpr(jaxpr) == 0


def test_casts_of_an_hlo_text_are_counted_in_fusions_too():
    text = """
    %fused (p: f32[3]) -> f32[3] {
      %p = f32[3]{0} parameter(0)
      %convert.1 = bf16[3]{0} convert(%p), metadata={op_name="convert("}
      ROOT %c = f32[3]{0} convert(%convert.1)
    }
    ENTRY %convert_fusion { ROOT %r = f32[3]{0} fusion(%x), calls=%fused }
    """
    assert program_figures.casts_in_hlo(text) == 2
    compiled = jax.jit(lambda x: x.astype(jnp.int32)).lower(X).compile()
    assert program_figures.casts_in_hlo(compiled.as_text()) == 1


def test_ratios_pair_the_rounds():
    found = step_summary.ratios([2.0, 9.0, 4.0, 1.0], [1.0, 3.0, 4.0, 2.0])
    assert found == {"median": 1.5, "quartiles": [0.625, 2.75]}
    assert step_summary.ratios([], [1.0]) is None
    with pytest.raises(ValueError):
        step_summary.ratios([1.0], [1.0, 2.0])


def measured(subject, mode, *rivals, deadline=float("inf")):
    """The comparison and its summary, of the baseline and the named rivals."""
    plan = Plan(rivals=rivals, rounds=1)
    comparison = Comparison(subject, "tiny", mode, plan, deadline)
    comparison.prepare(lambda doing: None)
    comparison.measure(lambda doing: None)
    return comparison, step_summary.summarise(comparison, absolute=False)


# Training measures all that inference does, of the same layers but for BatchNorm. Other
# tests train layers as these have, too.
QUICK = [("mlp", "inference"), ("resnet50", "inference")]
LONG = ("efficientnet", "gru", "llama", "moe", "swin", "unet")


@pytest.mark.parametrize(
    ("subject", "mode"),
    [
        *((subject, "training") for subject in SUBJECTS),
        *((other, "training") for other in OTHERS if other not in LONG),
        *(pytest.param(name, "training", marks=pytest.mark.slow) for name in LONG),
        *QUICK,
        *(
            pytest.param(subject, "inference", marks=pytest.mark.slow)
            for subject in SUBJECTS
            if (subject, "inference") not in QUICK
        ),
    ],
)
def test_a_subject_gives_every_figure(subject, mode):
    comparison, summary = measured(subject, mode, "autocast")
    rivals = summary["rivals"]
    wanted = TRAINING_FIGURES if mode == "training" else INFERENCE_FIGURES
    assert set(rivals) == {"float32", "autocast bfloat16"}
    assert all(set(figures) == wanted for figures in rivals.values())
    assert rivals["float32"]["step_ratio"]["median"] == 1
    assert rivals["autocast bfloat16"]["step_ratio"]["median"] > 0
    casts = [figures["casts_in_jaxpr"] for figures in rivals.values()]
    assert casts[0] < casts[1]
    if mode == "training":
        assert "bfloat16" not in rivals["float32"]["residual_bytes"]
        assert rivals["autocast bfloat16"]["residual_bytes"]["bfloat16"] > 0
    # The same batch and the same parameters give the same first step.
    variables = comparison.variables
    first, second = (after_one_step(p, variables) for p in comparison.programs.values())
    assert differs(second, first) < NOISE


# A bfloat16 is off by 2**-9 at most; a dozen of roundings follow each other.
NOISE = 12 * 2**-9


def differs(values, reference):
    """The norm of the difference, relative to that of the reference."""
    return np.linalg.norm(values - reference) / np.linalg.norm(reference)


def test_other_parameters_are_more_than_noise():
    subject = make_subject("mlp", "tiny")
    program = FlaxProgram(subject, FlaxRival(), "training")
    program.compile()
    params, state = jax.jit(subject.init)()
    first = after_one_step(program, (params, state))
    changed = jax.tree.map(lambda leaf: 1.1 * leaf, params)
    assert differs(after_one_step(program, (changed, state)), first) > NOISE


def after_one_step(program, variables):
    """The loss or the outputs of the first step."""
    program.start(variables, (program.subject.inputs, program.subject.targets))
    program.run(1)
    return np.asarray(program.result, np.float32)


def test_a_rival_that_fails_is_a_figure_and_the_others_go_on(monkeypatch):
    def refuse(fn):
        raise TypeError("not this one\nat all")

    monkeypatch.setattr(
        measuring,
        "flax_rivals",
        lambda platform: {
            "refused": FlaxRival(transform=refuse),
            "float32": FlaxRival(),
        },
    )
    _, summary = measured("mlp", "inference", "refused")
    assert summary["rivals"]["refused"]["error"] == "TypeError: not this one"
    assert step_summary.errors(summary) == "refused: TypeError: not this one"
    assert summary["rivals"]["float32"]["step_ratio"]["median"] == 1


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_each_rival_has_a_colour_to_be_drawn_in(platform):
    kinds = tuple(step_summary.COLORS)
    assert all(name.startswith(kinds) for name in flax_rivals(platform))


def test_a_rival_without_time_left_is_left_out():
    now = time.monotonic()
    _, summary = measured("mlp", "inference", "autocast", deadline=now)
    rivals = summary["rivals"]
    assert rivals["float32"]["step_ratio"]["median"] == 1
    assert rivals["autocast bfloat16"]["error"].startswith("BudgetError")


def test_on_gpus_float16_is_scaled_and_float32_has_two_settings():
    rivals = flax_rivals("gpu")
    assert [name for name in rivals if rivals[name].scaled] == ["autocast float16"]
    fused = "autocast bfloat16, cuDNN attention"
    assert [name for name in rivals if rivals[name].fused] == [fused]
    others = {f"autocast float16, {how}" for how in ("constant scale", "not scaled")}
    on_gpus = {"autocast float16", "float32 highest", fused, *others}
    on_cpus = [f"{name} bfloat16" for name in ("memory", "step", "both")]
    assert rivals.keys() ^ flax_rivals("cpu").keys() == {*on_gpus, *on_cpus}
    subject = make_subject("mlp", "tiny")
    for name in ("autocast float16", "float32 highest", *others):
        program = FlaxProgram(subject, rivals[name], "training")
        program.compile()
        loss = after_one_step(program, jax.jit(subject.init)())
        assert 0 < loss < 10  # as it was before scaling


def test_the_command_writes_figures_and_a_chart(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    options = "--subject mlp --size tiny --rounds 2 --rivals autocast by --residuals"
    steps.run(steps.parse(options.split()), Console())
    printed = capsys.readouterr().out
    assert "mlp (tiny), training" in printed
    assert "mlp.py:" in printed  # the line of a residual
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert path.name.startswith("steps-mlp-autocast-by-tiny-cpu-")
    commit = written["environment"]["commit"]
    assert commit is None or re.fullmatch(r"[\w.-]+", commit)
    processor = written["environment"]["processor"]
    assert {"name", "avx512_bf16", "amx_bf16", "held_back"} == set(processor)
    pairs = [(c["subject"], c["mode"]) for c in written["figures"]["comparisons"]]
    assert pairs == [("mlp", "training"), ("mlp", "inference")]
    for comparison in written["figures"]["comparisons"]:
        assert set(comparison["rivals"]) == {
            "float32",
            "autocast bfloat16",
            "by hand bfloat16",
        }
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_failure_does_not_lose_the_figures_before_it(monkeypatch, tmp_path):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    measure = Comparison.measure

    def fail_in_inference(self, say):
        if self.mode == "inference":
            raise RuntimeError("the machine is gone")
        measure(self, say)

    monkeypatch.setattr(Comparison, "measure", fail_in_inference)
    options = "--subject mlp --size tiny --figures-only --rivals autocast"
    with pytest.raises(RuntimeError, match="gone"):
        steps.run(steps.parse(options.split()), Console(quiet=True))
    (path,) = tmp_path.glob("*.json")
    (kept,) = json.loads(path.read_text())["figures"]["comparisons"]
    assert kept["mode"] == "training"
    assert "step_ratio" not in kept["rivals"]["float32"]


def test_the_processor_is_read_from_the_system(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(results_file, "CPU_INFO", info)
    flags = {"avx512_bf16": None, "amx_bf16": None, "held_back": None}
    assert results_file.processor() == {"name": None, **flags}
    info.write_text("model name\t: Fast One\nflags\t\t: fpu amx_bf16 avx2\n")
    has = {"avx512_bf16": False, "amx_bf16": True, "held_back": False}
    known = {"name": "Fast One", **has}
    assert results_file.processor() == known


@pytest.mark.parametrize("mode", networks.MODES)
def test_a_small_network_is_compared_with_float32(mode, monkeypatch):
    monkeypatch.setattr(networks, "PAIRS", 1)
    found = networks.measure("two towers", mode)
    assert found["ratio"] > 0
    assert found["autocast_temporary_bytes"] > 0
    assert 1e-4 < found["distance"] < 2**-7
