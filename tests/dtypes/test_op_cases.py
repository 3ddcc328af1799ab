"""The table of op cases is complete, and its cases compute what they say they do."""

import ast
import json
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from op_cases import CASES, DRAWS, GROUPS, NO_COUNTERPART, OpCase, Spec, draw
from tables import check_each
from torch_parity import computed, references

TABLE = json.loads(
    (Path(__file__).parents[1] / "data" / "torch_op_table.json").read_text("utf-8")
)
OPS = {op["name"]: op for op in TABLE["ops"]}
MODULES = {"jax": jax, "jnp": jnp, "lax": lax, "nn": nn, "np": np, "optax": optax}
TOLERANCE = 1e-3

LOW = (jnp.float16, jnp.bfloat16)


def check_cases(check):
    check_each(CASES, check, lambda case: case.op)


def assert_close(actual, reference):
    """Each output is finite and within `TOLERANCE` of the reference's largest entry."""
    assert len(actual) == len(reference)
    for x, y in zip(actual, reference, strict=True):
        assert x.shape == y.shape
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()
        if x.size:
            scale = max(np.abs(y).max(), 1e-6)
            assert np.abs(x.astype(y.dtype) - y).max() <= TOLERANCE * scale


def assert_traces_as_stated(case, dtype):
    arguments = draw(case, dtype)
    if case.traces_16bit:
        jax.make_jaxpr(case.fn)(*arguments)
    else:
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            jax.jit(case.fn).lower(*arguments)


def unknown_names(expression):
    """Names in an expression that the module they are taken from does not have."""
    unknown = set()
    for node in ast.walk(ast.parse(expression, mode="eval")):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        owner = MODULES.get(node.id) if isinstance(node, ast.Name) else None
        for name in reversed(names):
            if owner is not None and not hasattr(owner, name):
                unknown.add(name)
            owner = getattr(owner, name, None)
    return unknown


def test_every_torch_op_is_a_case_or_has_a_reason_not_to_be():
    named = Counter([*(case.op for case in CASES), *NO_COUNTERPART])
    assert {name: count for name, count in named.items() if count > 1} == {}
    assert set(named) == set(OPS)


def test_the_table_names_every_torch_op_once():
    assert len(OPS) == len(TABLE["ops"]) == 353


@pytest.mark.slow
def test_what_the_table_says_of_torch_is_what_torch_returns():
    pytest.importorskip("torch")
    from op_cases.in_torch import CALLS, measure

    cases = [case for case in CASES if case.op in CALLS]

    def check(case):
        assert measure(case) == OPS[case.op]["measured"]

    check_each(cases, check, lambda case: case.op)


def test_the_table_uses_the_policies_and_dtypes_it_declares():
    dtypes = {"low", "float32", "complex64", "complex32", "int64", "int32", "error"}

    def check(op):
        assert {op["cuda"], op["cpu"]} <= set(TABLE["policies"])
        for device in ("cuda", "cpu"):
            measured = op["measured"][device]
            assert set(measured) == {"float32", "low"}
            assert (measured["float32"] is None) == (measured["low"] is None)
            for tokens in measured.values():
                assert tokens is None or (tokens and set(tokens) <= dtypes)

    check_each(OPS.values(), check, lambda op: op["name"])


def test_a_missing_counterpart_has_a_reason():
    def check(op):
        reason = NO_COUNTERPART[op]
        assert reason.startswith("removed from torch") == OPS[op]["removed"]
        for prefix in ("removed from torch 2.x; see ", "internal name of "):
            if reason.startswith(prefix):
                others = reason.removeprefix(prefix).replace(" and ", ", ").split(", ")
                assert set(others) <= {case.op for case in CASES}

    check_each(NO_COUNTERPART, check)


def test_a_counterpart_names_functions_that_exist():
    def check(case):
        assert unknown_names(case.counterpart) == set()

    check_cases(check)


# test_torch_parity.py holds the values to float64 too, under autocast and closer.
@pytest.mark.numbers
@pytest.mark.parametrize(
    ("group", "values"),
    [
        pytest.param(group, values, marks=[pytest.mark.slow] if values else [])
        for group, cases in GROUPS.items()
        for values in sorted({case.values for case in cases})
    ],
)
def test_a_case_agrees_with_itself_in_float64(group, values):
    wide = {np.dtype(np.float64), np.dtype(np.complex128)}
    cases = {case.op: case for case in GROUPS[group] if case.values == values}
    singles = computed(
        {op: case.fn for op, case in cases.items()},
        {op: draw(case, np.float32) for op, case in cases.items()},
    )

    def check(op):
        single, double = singles[op], references(group)[op]
        if not cases[op].values:
            assert [x.shape for x in single] == [x.shape for x in double]
            assert all(np.isfinite(x).all() for x in single)
        else:
            assert_close(single, double)
        assert all(
            x.dtype in wide for x in double if np.issubdtype(x.dtype, np.inexact)
        )

    check_each(cases, check)


def test_a_case_has_as_many_outputs_as_torch():
    def check(case):
        outputs = jax.tree.leaves(jax.eval_shape(case.fn, *draw(case, np.float32)))
        if case.index:
            assert len(outputs) == len(case.index)
        for device in ("cuda", "cpu"):
            for tokens in OPS[case.op]["measured"][device].values():
                # One dtype stands for any number of outputs that share it.
                if tokens is not None and len(tokens) > 1:
                    index = case.index or tuple(range(len(tokens)))
                    assert len(outputs) == len(index)
                    assert max(index) < len(tokens)

    check_cases(check)


@pytest.mark.parametrize("dtype", LOW, ids=["f16", "bf16"])
def test_a_case_traces_in_16_bits_as_stated(dtype):
    check_cases(lambda case: assert_traces_as_stated(case, dtype))


@pytest.mark.parametrize("dtype", LOW, ids=["f16", "bf16"])
def test_a_case_draws_the_same_numbers_in_every_dtype(dtype):
    def check(case):
        single = draw(case, np.float32)
        again = draw(case, np.float32)
        low = draw(case, dtype)
        floats = 0
        for spec, x, y, z in zip(case.inputs, single, again, low, strict=True):
            assert x.shape == z.shape == spec.shape
            np.testing.assert_array_equal(x, y)
            if jnp.issubdtype(x.dtype, jnp.floating):
                floats += 1
                assert (x.dtype, z.dtype) == (jnp.float32, dtype)
                np.testing.assert_array_equal(x, np.asarray(z, np.float32))
        assert floats

    check_cases(check)


def test_every_way_to_draw_is_used():
    assert {spec.kind for case in CASES for spec in case.inputs} == set(DRAWS)


# What follows feeds each comparing function a wrong value.


@pytest.mark.parametrize(
    "actual",
    [[1.0, 2.01], [1.0, np.nan], [1.0, np.inf], [1.0], [[1.0, 2.0]]],
    ids=["off", "nan", "inf", "short", "shape"],
)
def test_comparing_rejects_a_wrong_value(actual):
    reference = [np.array([1.0, 2.0])]
    assert_close([np.array([1.0, 2.0001], np.float32)], reference)
    with pytest.raises(AssertionError):
        assert_close([np.array(actual, np.float32)], reference)


def test_comparing_rejects_a_missing_output():
    with pytest.raises(AssertionError):
        assert_close([], [np.array([1.0])])


def test_tracing_rejects_a_case_that_states_the_opposite():
    inputs = (Spec((4,)), Spec((4,)))
    traces = OpCase("add", jnp.add, inputs, "x + y", traces_16bit=False)
    with pytest.raises(pytest.fail.Exception):
        assert_traces_as_stated(traces, jnp.bfloat16)
    raises = OpCase("complex", lax.complex, inputs, "lax.complex(x, y)")
    with pytest.raises(TypeError):
        assert_traces_as_stated(raises, jnp.bfloat16)


def test_an_unknown_name_is_found():
    assert unknown_names("jnp.sum(jnp.nosuch(x)).mean()") == {"nosuch"}
    assert unknown_names("lax.alsonot.exp(x)") == {"alsonot"}
