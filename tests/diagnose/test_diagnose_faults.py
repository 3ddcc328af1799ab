"""`jamp.diagnose` names the line of a planted fault, and a change that cures it."""

import functools
import inspect

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

pytestmark = pytest.mark.numbers

# Twenty roundings: these programs are a few operations long.
CLOSE = {name: 20 * float(jnp.finfo(name).eps) for name in ("float16", "bfloat16")}

each_fault = pytest.mark.parametrize("name", faults.NAMES)
fault_of = functools.cache(faults.load)


@functools.cache
def diagnosis_of(name):
    return faults.diagnosis_of(fault_of(name))


# XLA may leave out roundings to 16 bits unless it is told not to.
compiled = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)


def autocast(fault, fn):
    return jamp.autocast(fn, device_type="gpu", dtype=fault.dtype)


def run(fn, fault, loss_scale):
    """What a function returns and, if asked for, its gradient; no longer scaled."""
    if fault.loss_scale is None:
        return compiled(fn)(*fault.args)

    def scaled_loss(*args):
        loss = fn(*args)
        return loss.astype(np.float32) * loss_scale, loss

    grads, loss = compiled(jax.grad(scaled_loss, has_aux=True))(*fault.args)
    return loss, jax.tree.map(lambda grad: grad / loss_scale, grads)


def distance(found, expected):
    """The largest relative error, in norm, of an array of a tree; inf for a NaN."""
    errors = [
        np.linalg.norm(np.float64(x) - np.float64(y)) / np.linalg.norm(np.float64(y))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    return float(max(np.nan_to_num(errors, nan=np.inf, posinf=np.inf)))


def in_float32(fault):
    """The program in float32, where its own casts to 16 bits are repaired."""
    return run(fault.repaired or fault.fn, fault, 1.0)


def pasted(code, fault):
    """What a suggestion's code makes of a function in the module of the fault."""
    names = {**inspect.unwrap(fault.fn).__globals__, "jamp": jamp, "fn": fault.fn}
    *policy, call = code.splitlines()
    exec("\n".join(policy), names)
    return eval(call, names)


@each_fault
def test_the_line_and_operation_are_found(name):
    fault, finding = fault_of(name), diagnosis_of(name).findings[0]
    assert finding.location.file == faults.path_of(name)
    assert finding.location.line == faults.marked_line(name)
    assert (finding.kind, finding.operation) == (fault.kind, fault.operation)


@each_fault
def test_nothing_else_is_blamed(name):
    lines = {finding.location.line for finding in diagnosis_of(name).findings}
    assert lines == {faults.marked_line(name)}


@each_fault
def test_the_fault_is_one(name):
    fault = fault_of(name)
    found = run(autocast(fault, fault.fn), fault, fault.loss_scale or 1.0)
    with np.errstate(all="ignore"):
        assert distance(found, in_float32(fault)) > CLOSE[fault.dtype]


@each_fault
def test_what_is_suggested_cures_it(name):
    fault, suggestions = fault_of(name), diagnosis_of(name).suggestions
    assert suggestions
    # What is to be changed in the program itself is changed there.
    fn = autocast(fault, fault.repaired or fault.fn)
    loss_scale = fault.loss_scale or 1.0
    for suggestion in suggestions:
        if suggestion.options:
            fn = pasted(suggestion.code, fault)
        loss_scale = suggestion.loss_scale or loss_scale
    by_hand = not any(s.options or s.loss_scale for s in suggestions)
    assert by_hand == (fault.repaired is not None)
    cured = run(fn, fault, loss_scale)
    assert distance(cured, in_float32(fault)) < CLOSE[fault.dtype]


@each_fault
def test_a_suggestion_is_said_to_cure_if_jamp_can_apply_it(name):
    by_program = name == "custom_gradient"
    assert all(s.cured != by_program for s in diagnosis_of(name).suggestions)


def test_a_wrong_result_is_told_from_a_right_one():
    right = [np.ones(3), np.ones(3)]
    assert distance(right, right) == 0
    assert distance([np.ones(3), np.array([1, 1, np.nan])], right) == np.inf
    assert distance([np.full(3, 1.1), np.ones(3)], right) > CLOSE["float16"]
