"""Policies with something wrong in them: tables, files that are none, and fields."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import jamp

GPU = jamp.Policy.load("gpu")
RULE = GPU.rule("exp")

TYPOS = {
    "unknown key": ('[lowr]\nprimitives = ["exp"]', ["lowr", "did you mean 'lower'"]),
    "unknown key in a rule": ('[lower]\nprimitive = ["exp"]', ["lower", "primitives"]),
    "unknown primitive": (
        '[lower]\nprimitives = ["expp"]',
        ["lower.primitives", "expp"],
    ),
    "unknown function": (
        '[float32]\nfunctions = ["jax.nn.softmx"]',
        ["float32.functions", "jax.nn.softmx"],
    ),
    "no dotted name": (
        '[lower]\nfunctions = ["softmax"]',
        ["lower.functions", "softmax"],
    ),
    "dtype": ('dtype = "float32"', ["dtype", "float32"]),
    "dtype of another type": ("dtype = 16", ["dtype", "16"]),
    "not TOML": ("[lower\n", ["not valid TOML"]),
    "duplicate key": ("[lower]\n[lower]\n", ["not valid TOML"]),
    "listed twice": (
        '[lower]\nprimitives = ["exp"]\n[float32]\nprimitives = ["exp"]',
        ["float32.primitives", "lower.primitives", "exp"],
    ),
    "listed twice in one list": (
        '[lower]\nprimitives = ["exp", "exp"]',
        ["lower.primitives", "exp"],
    ),
    "not a list": ('[lower]\nprimitives = "exp"', ["lower.primitives", "list"]),
    "not a list of strings": ("[lower]\nprimitives = [1]", ["lower.primitives", "[1]"]),
    "not a table": ("lower = 3", ["lower", "table"]),
    "extends an unknown policy": (
        'extends = "npu"',
        ["extends", "npu", "base, gpu, cpu, tpu"],
    ),
    "unknown key in unsafe": ("[[unsafe]]\nprimitive = []", ["unsafe", "primitive"]),
    "missing key in unsafe": ('[[unsafe]]\nprimitives = ["log"]', ["unsafe", "of"]),
    "wrong dtype in unsafe": (
        '[[unsafe]]\nprimitives=["log"]\nof=["exp"]\ndtype="half"\nadvice="no"',
        ["half"],
    ),
    "unknown primitive in unsafe": (
        '[[unsafe]]\nprimitives=["lg"]\nof=["exp"]\ndtype="float16"\nadvice="no"',
        ["lg"],
    ),
    "unsafe is no list": ("unsafe = 3", ["unsafe"]),
    "unsafe is no list of tables": ("unsafe = [1]", ["unsafe", "tables"]),
    "function listed twice": (
        '[lower]\nfunctions=["jax.nn.relu"]\n[promote]\nfunctions=["jax.nn.relu"]',
        ["promote.functions: 'jax.nn.relu' is listed under lower.functions too"],
    ),
    "results is no table": ("results = 3", ["results"]),
    "a result that is no dotted name": (
        '[results]\nactivation = ["softmax"]',
        ["results.activation: 'softmax' is not a dotted name"],
    ),
    "unknown result": ('[results]\nactivation = ["jax.nn.softmx"]', ["softmx"]),
    "name of another type": ("name = 3", ["name"]),
    "a switch of another type": (
        "float32_gradients = 1",
        ["float32_gradients: must be true or false, got 1"],
    ),
    "advice of another type": (
        '[[unsafe]]\nprimitives=["log"]\nof=["exp"]\ndtype="float16"\nadvice=3',
        ["unsafe", "advice must be a string, got 3"],
    ),
    "a function without a rule in unsafe": (
        '[[unsafe]]\nprimitives=["log"]\nof=["jax.nn.hard_tanh"]\ndtype="float16"\n'
        'advice="no"',
        ["unsafe.of: 'jax.nn.hard_tanh' has no rule"],
    ),
    "a number that is too long": (f"name = {'9' * 5000}", ["not valid TOML"]),
    "nested too deeply": ("x = " + "[" * 5000, ["not valid TOML"]),
    "a misspelt primitive": (
        '[lower]\nprimitives = ["tahn"]',
        ["unknown primitive 'tahn'; did you mean 'tanh'?"],
    ),
    "a misspelt function": (
        '[float32]\nfunctions = ["jax.nn.sotfmax"]',
        ["no function 'jax.nn.sotfmax'; did you mean 'jax.nn.softmax'?"],
    ),
    "a misspelt dtype": ('dtype = "flaot16"', ["did you mean 'float16'?"]),
    "a misspelt policy": ('extends = "gpuu"', ["did you mean 'gpu'?"]),
}


@pytest.mark.parametrize("text, words", TYPOS.values(), ids=TYPOS)
def test_a_wrong_table_raises_and_names_file_and_key(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    head = "" if "extends" in text or "dtype = " in text else 'extends = "gpu"\n'
    path.write_text(head + text, encoding="utf-8")
    with pytest.raises(jamp.PolicyError) as error:
        jamp.Policy.load(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert message.count(str(path)) == 1
    assert all(word in message for word in words)


def test_a_table_without_a_dtype_raises(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[lower]\nprimitives = ["dot_general"]', encoding="utf-8")
    with pytest.raises(jamp.PolicyError, match="dtype is missing; or begin with ext"):
        jamp.Policy.load(path)


@pytest.mark.parametrize(
    "source", ["gpuu", "missing/file.toml", "", "a\0b", "\ud800", None, 3, b"gpu"]
)
def test_a_file_that_is_not_there_raises_and_lists_the_policies(source):
    with pytest.raises(jamp.PolicyError) as error:
        jamp.Policy.load(source)
    assert all(word in str(error.value) for word in ("gpu", "cpu", "tpu", "TOML"))


def test_a_policy_in_the_place_of_a_file_is_not_printed():
    with pytest.raises(jamp.PolicyError, match="cannot read policy from a Policy: "):
        jamp.Policy.load(jamp.Policy.load("gpu"))


def test_a_file_that_is_no_text_raises(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(jamp.PolicyError, match=re.escape("mine.toml")):
        jamp.Policy.load(path)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"dtype": jnp.float32}, "must be float16 or bfloat16, got"),
        ({"dtype": "low"}, "must be float16 or bfloat16, got 'low'"),
        ({"float32_gradients": "no"}, "must be True or False, got 'no'"),
        ({"scopes": (("a", "float32"),)}, "scopes must be a tuple of pairs"),
        ({"primitives": [("sin", "float32")]}, "primitives must be a tuple"),
        ({"primitives": (("dot_genral", RULE),)}, "did you mean 'dot_general'"),
        ({"functions": (("jax.nn.softmax", RULE),)}, "functions must be .* got"),
        ({"scopes": ((3, RULE),)}, "scopes must be .* got .3, "),
        ({"scopes": (("a",),)}, "scopes must be .* got .'a',"),
        ({"scopes": "lm_head"}, "scopes must be .* got 'lm_head'"),
        ({"unsafe": ("log",)}, "unsafe must be .* got 'log'"),
        ({"activation_results": ("relu",)}, "activation_results must be .* got 'relu'"),
    ],
)
def test_wrong_fields_of_a_policy_raise_and_say_what(wrong, words):
    with pytest.raises(jamp.PolicyError, match=words):
        dataclasses.replace(GPU, **wrong)
