"""docs/ops.md says what the tables say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from op_cases import CASES, NO_COUNTERPART
from torch_parity import DATA, OPS, differences

import jamp

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("ops_page", ROOT / "docs/generate_ops.py")
ops_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ops_page)


@pytest.fixture(scope="module")
def page():
    return ops_page.page()


def rows(text):
    """The rows of all tables, by the op they begin with."""
    found = [re.match(r"\| `(\w+)` \|", line) for line in text.splitlines()]
    return [match[1] for match in found if match]


def test_the_page_is_as_generated(page):
    written = (ROOT / "docs/ops.md").read_text("utf-8")
    assert written == page, "run python docs/generate_ops.py"


def test_checking_finds_a_stale_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops_page, "page", lambda: page)
    target = tmp_path / "ops.md"
    assert ops_page.main(["--check"], target) == 1
    assert ops_page.main([], target) == 0
    assert ops_page.main(["--check"], target) == 0
    target.write_text(page.replace("float32", "float16", 1))
    assert ops_page.main(["--check"], target) == 1
    assert "stale" in capsys.readouterr().err


def test_every_op_has_one_row(page):
    assert sorted(rows(page)) == sorted(OPS)


def test_every_case_is_in_one_section():
    cases = [case for module in ops_page.SECTIONS.values() for case in module.CASES]
    assert sorted(case.op for case in cases) == sorted(case.op for case in CASES)


def test_every_reason_is_given(page):
    for known in differences():
        assert known.reason in page
    for reason in NO_COUNTERPART.values():
        assert reason in page


def test_every_difference_is_marked_in_its_row(page):
    lines = dict(
        zip(rows(page), re.findall(r"^\| `\w+` \|.*$", page, re.M), strict=True)
    )
    marks = {op: 0 for op in lines}
    for known in differences():
        for op, device in {(op, device) for op, device, _ in known.keys}:
            cell = lines[op].split(" | ")[{"gpu": 2, "cpu": 3}[device]]
            assert f"[{ops_page.letters()[known.reason]}]" in cell
            marks[op] += 1
    assert {op: line.count("#remaining") for op, line in lines.items()} == marks


def test_no_table_has_more_columns_than_fit_on_a_page(page):
    tables = re.findall(r"^\| --- .*$", page, re.M)
    assert {line.count("---") for line in tables} == {4}


def test_the_policy_of_tpu_has_the_rules_of_gpu_as_the_page_says():
    gpu, tpu = jamp.Policy.load("gpu"), jamp.Policy.load("tpu")
    assert (gpu.primitives, gpu.functions) == (tpu.primitives, tpu.functions)


def test_the_page_names_the_torch_that_was_measured(page):
    table = json.loads((DATA / "torch_op_table.json").read_text("utf-8"))
    version = re.match(r"torch (\d+\.\d+)", table["source"])[1]
    assert f"torch {version} returns" in page


@pytest.mark.parametrize(
    "op, device, dtypes",
    [
        ("mm", "gpu", "16-bit"),
        ("exp", "cpu", "as input"),
        ("cummax", "gpu", "as input, int64"),
        ("quantile", "gpu", "float32 / error"),
        ("frobenius_norm", "cpu", "-"),
    ],
)
def test_dtypes_are_put_in_words(op, device, dtypes):
    assert ops_page.torch_dtypes(op, device) == dtypes


@pytest.mark.parametrize(
    "op, device, rule",
    [
        ("mm", "gpu", "lower: `dot_general`"),
        ("softmax", "gpu", "float32: `jax.nn.softmax`"),
        ("softmax", "cpu", "internal float32: `jax.nn.softmax`"),
        ("addmm", "gpu", "promote"),
        ("LSTMCell", "cpu", "promote"),
        ("searchsorted", "gpu", "integers"),
    ],
)
def test_the_rule_is_that_of_the_equation_that_decides(op, device, rule):
    case = next(case for case in CASES if case.op == op)
    assert ops_page.jamp_rule(case, device) == rule
