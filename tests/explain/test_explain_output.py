"""What reports say first, their tree of modules, and how they are shown."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from terminals import shown

import jamp

X = jnp.ones((2, 8))
HERE = Path(__file__).name
GPU = jamp.Policy.load("gpu")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, name="out")(nn.gelu(nn.Dense(16, name="up")(x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Block()(x)
        y = nn.Dense(4, name="head")(x)
        return jnp.matmul(y, y.T, precision="highest")


@pytest.fixture(scope="module")
def variables():
    return Network().init(jax.random.key(0), X)


@pytest.fixture(scope="module")
def report(variables):
    explain = jamp.explain(Network().apply, residuals=True, device_type="gpu")
    return explain(variables, X)


def test_all_is_well_with_nothing_to_say():
    assert jamp.explain(lambda x: x @ x.T)(X).warnings == ()


def test_no_lowered_matmul_comes_first_with_the_reason():
    policy = GPU.with_rules(float32=["dot_general"])
    report = jamp.explain(lambda x: x @ x.T, policy=policy)(X)
    assert report.warnings == ("NO MATMUL RUNS IN 16 BITS: dot_general in gpu*",)


def test_matmuls_kept_wide_are_told_with_their_share(report):
    (sentence,) = report.warnings
    last = 2 * 2 * 2 * 4
    assert "1 of 6 matmuls" in sentence
    assert f"({last / report.flops:.1%} of their FLOPs)" in sentence
    assert sentence.endswith("precision asked for in the program")


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (np.ones((2, 2)), "float64 is not cast"),
        (np.ones((2, 2), complex), "complex128 is not cast"),
        (np.ones((2, 2), np.int32), "int32 is not cast"),
    ],
)
def test_matmuls_of_dtypes_that_are_never_cast_are_told_as_such(x, reason):
    with jax.enable_x64(True):
        report = jamp.explain(lambda x: x @ x)(x)
    assert report.warnings == (f"NO MATMUL RUNS IN 16 BITS: {reason}",)
    assert reason in report.text()


def test_operations_that_nothing_knows_are_told():
    def double(_, x):
        return x + x

    def fn(x):
        return jax.custom_derivatives.linear_call(double, double, (), x) @ x.T

    report = jamp.explain(fn)(X)
    assert [record.primitive for record in report.unknown] == ["linear_call"]
    (sentence,) = report.warnings
    assert sentence.endswith("the policy does not know them: linear_call (1)")
    assert report.to_dict()["unknown"] == {"linear_call": 1}


def test_entries_of_the_user_that_decided_nothing_are_told():
    policy = (
        GPU.with_rules(float32=["sin", "cos", jax.nn.relu, jax.nn.silu])
        .scoped("**/head", "float32")
        .scoped("tail", "float32")
    )

    @jax.named_scope("head")
    def head(x):
        return x @ x.T

    report = jamp.explain(
        lambda x: jax.nn.silu(jnp.sin(head(x))) @ x, device_type="gpu", policy=policy
    )(X)
    added = {(e.kind, e.name, e.rule.value) for e in report.unused if e.added}
    assert added == {
        ("primitive", "cos", "float32"),
        ("function", "jax.nn.relu", "float32"),
        ("scope", "tail", "float32"),
    }
    sentence = report.warnings[0]
    assert sentence.startswith("entries added to the policy that decided about nothing")
    assert "scope 'tail' (float32)" in sentence
    listed = {(entry.kind, entry.name) for entry in report.unused if not entry.added}
    assert ("primitive", "exp") in listed
    assert ("primitive", "dot_general") not in listed
    entries = report.to_dict()["unused_entries"]
    assert {
        "kind": "scope",
        "name": "tail",
        "rule": "float32",
        "added": True,
    } in entries


def test_an_entry_is_not_used_by_another_policy_of_the_same_name():
    inner = jamp.autocast(jnp.arctan2, policy=GPU.with_rules(float32=["atan2"]))

    def fn(x):
        return inner(x @ x.T, X @ X.T)

    policy = GPU.with_rules(float32=["atan2", "sin"])
    report = jamp.explain(jamp.autocast(fn, policy=policy))(X)
    assert {entry.name for entry in report.unused if entry.added} == {"atan2", "sin"}


def test_no_entry_is_added_in_a_policy_of_jamp(report):
    assert not any(entry.added for entry in report.unused)


def test_modules_are_a_tree_whose_figures_add_up(report):
    root = report.modules
    (network,) = root.children
    block, head = network.children
    assert (block.name, head.name) == ("Block_0, Block_1, the same 2 times", "head")
    assert [child.name for child in block.children] == ["up", "out"]
    assert block.flops == 2 * 2 * (2 * 2 * 8 * 16)
    assert block.low_flop_share == 1
    for module in (root, network, block):
        parts = [*module.children, *module.own]
        assert module.flops == sum(part.flops for part in parts)
        assert module.cast_bytes == sum(part.cast_bytes for part in parts)
        number = len(module.own) + sum(len(c.operations) for c in module.children)
        assert len(module.operations) == number
    assert (root.flops, root.casts) == (report.flops, report.casts)


def test_what_stands_in_no_module_is_under_the_users_function():
    def inner(x):
        return x @ x.T

    report = jamp.explain(lambda x: inner(x) + 1)(X)
    assert [child.name for child in report.modules.children] == [
        "inner()",
        "<lambda>()",
    ]


def test_text_by_module_is_indented_and_names_each_line(report):
    lines = report.text("module").splitlines()
    table = lines[lines.index("") + 1 :]
    for name in ("apply ", "  Network ", "    Block_0, Block_1, the ", "      up "):
        assert any(text.startswith(name) for text in table)
    (product,) = [text for text in table if "- dot_general" in text]
    assert "f32" in product
    assert f"{HERE}:{source_line('precision=')}" in product
    (head,) = [text for text in table if text.strip().startswith("head ")]
    assert f"{2 * 2 * 8 * 4} " in head
    assert "100.0%" in head


def source_line(part):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if part in text)


def test_text_says_what_is_kept_for_the_backward_pass(report):
    kept, written = (
        sum(sizes.values()) for sizes in report.to_dict()["residual_bytes"].values()
    )
    (sentence,) = [t for t in str(report).splitlines() if "backward" in t]
    assert f"{kept} B kept" in sentence or f"{kept / 1024:.1f} KiB kept" in sentence
    assert f"{written / 1024:.1f} KiB by the function as written" in sentence


def test_its_repr_is_one_short_line(report):
    assert repr(report) == "<Report of apply: autocast on gpu to float16, policy gpu>"


def test_data_is_json_with_an_entry_for_each_equation(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert data["function"] == "apply"
    assert (data["device_type"], data["dtype"], data["policy"], data["enabled"]) == (
        "gpu",
        "float16",
        "gpu",
        True,
    )
    assert data["warnings"] == list(report.warnings)
    figures = data["figures"]
    assert figures["equations"] == len(data["operations"]) == len(report.records)
    assert (figures["matmuls"], figures["low_matmuls"]) == (6, 5)
    assert (
        figures["flops"]
        == report.flops
        == sum(op["flops"] for op in data["operations"])
    )
    assert figures["casts"] == sum(len(op["casts"]) for op in data["operations"])
    assert figures == data["modules"]["figures"]
    product = next(op for op in data["operations"] if op["flops"])
    assert product["primitive"] == "dot_general"
    assert product["function"] == "flax.linen.Dense"
    assert product["rule"] == "lower"
    assert product["scope"] == ["Network", "Block_0", "up"]
    assert product["operands"] == ["float16", "float16"]
    assert product["results"] == ["float16"]
    assert product["result_bytes"] == {"float16": 2 * 2 * 16}
    assert Path(product["file"]).name == HERE
    assert product["casts"][0] == {"from": "float32", "to": "float16", "shape": [2, 8]}


def test_a_report_that_is_pickled_says_what_to_keep_instead(report):
    for keep in (pickle.dumps, copy.deepcopy):
        with pytest.raises(jamp.AutocastTypeError, match=r"keep report\.to_dict\(\)"):
            keep(report)
    assert pickle.loads(pickle.dumps(report.to_dict())) == report.to_dict()


def test_a_copy_of_a_report_is_equal_to_it(report):
    assert copy.copy(report) == report


def test_a_report_is_equal_to_itself_alone_and_has_a_hash():
    report, again = (jamp.explain(lambda x: x @ x)(jnp.ones((2, 2))) for _ in range(2))
    assert len({report, report, again}) == 2


def test_data_of_symbolic_shapes_is_json():
    (rows,) = jax.export.symbolic_shape("b")
    report = jamp.explain(lambda x: jnp.exp(x @ x.T), device_type="gpu")(
        jax.ShapeDtypeStruct((rows, 8), np.float32)
    )
    data = json.loads(json.dumps(report.to_dict()))
    shapes = [cast["shape"] for op in data["operations"] for cast in op["casts"]]
    assert ["b", 8] in shapes
    assert data["figures"]["flops"] == 0  # not known


def test_a_loop_of_symbolic_length_counts_once():
    (length,) = jax.export.symbolic_shape("n")

    def fn(w, xs):
        return jax.lax.scan(lambda c, x: (c + x @ w, None), xs[0], xs)[0]

    w = jnp.ones((8, 8))
    shapes = [jax.ShapeDtypeStruct((n, 4, 8), np.float32) for n in (length, 1)]
    found = [jamp.explain(fn, device_type="gpu")(w, xs).flops for xs in shapes]
    assert found[0] == found[1] > 0


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(11):
            attend = nn.MultiHeadDotProductAttention(num_heads=2, name=f"layers_{i}")
            x = x + attend(nn.LayerNorm()(x))
        labels = jnp.zeros(x.shape[:-1], int)
        return optax.softmax_cross_entropy_with_integer_labels(x, labels)


@pytest.fixture(scope="module")
def deep():
    x = jnp.ones((1, 3, 8))
    variables = jax.eval_shape(Attention().init, jax.random.key(0), x)
    return jamp.explain(Attention().apply, device_type="gpu")(variables, x)


@pytest.mark.parametrize("group", ["function", "module"])
def test_text_about_a_deep_model_fits_a_hundred_and_ten_columns(deep, group):
    text = deep.text(group)
    longer = len(HERE) - len("gpt.py")
    assert max(map(len, text.splitlines())) <= 110 + longer
    for part in ("layers_10", "query", "DenseGeneral", "softmax_..labels"):
        assert part in text


def test_a_scan_says_how_often_it_runs_and_all_figures_count_that():
    def fn(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    report = jamp.explain(fn, device_type="gpu")(X, jnp.ones((24, 8, 8)))
    assert "in loops, 24 times:" in str(report)
    assert "dot_general, 24 times" in report.text("module")
    assert "24 times" in report.to_html()
    assert "24 of 24 matmuls" in str(report)
    figures = report.to_dict()["figures"]
    product = 2 * 2 * 8 * 8
    assert (figures["matmuls"], figures["flops"]) == (24, 24 * product)
    assert figures["casts"] >= 24


def test_a_terminal_of_80_columns_breaks_no_rule():
    text = shown(jamp.explain(lambda x: jax.nn.gelu(x @ x.T), device_type="gpu")(X), 80)
    assert "internal_float32  test_" in text


@pytest.mark.parametrize("width", [50, 80, 140])
def test_the_terminal_shows_all_within_its_width(report, width):
    text = shown(report, width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("warnings", "precision", "Block_1", "100.0%", "backward"):
        assert part in text


def test_the_terminal_colours_by_dtype(report):
    text = shown(report, 140, force_terminal=True, color_system="standard")
    assert "\x1b[36mf16\x1b[0m" in text
    assert "\x1b[33mf32\x1b[0m" in text


def test_markup_in_names_is_shown_as_it_is():
    @jax.named_scope("layer[bold]")
    def fn(x):
        return x @ x.T

    assert "layer[bold]" in shown(jamp.explain(fn)(X), 100)


def test_rich_is_imported_only_to_print():
    check = (
        "import sys, jamp, jax.numpy as jnp\n"
        "report = jamp.explain(lambda x: x @ x)(jnp.ones((2, 2)))\n"
        "report.text('module'), report.to_html(), report.to_dict()\n"
        "raise SystemExit('rich' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_modules_of_nnx_are_told_by_function():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x)

    report = jamp.explain(lambda model, x: model(x), device_type="gpu")(Model(), X)
    (module,) = report.modules.children
    assert module.name.endswith("__call__()")
    assert module.flops == 2 * 2 * 8 * 4
