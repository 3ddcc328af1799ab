"""Plans: what is decided before anything runs, and that what runs follows it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, traced
from programs import PROGRAMS

import jamp
from jamp._diagnose.widened import _HOLDERS
from jamp._emit import emit, emitter
from jamp._plan.planner import make_plan
from jamp._plan.programs import STRUCTURAL, structural
from jamp._primitives import CALLS
from jamp._tracing.options import Arguments

every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)


def plan_of(program, arrays, device="cpu"):
    """The plan of a traced program for a device type."""
    return make_plan(program, arrays, Arguments(device).options())


def checked(emission):
    """An emission whose results are held to the plan."""

    def emit_and_check(running, action, *rest):
        made = list(emission(running, action, *rest))
        found = [getattr(jax.typeof(array), "dtype", None) for array in made]
        assert found == [value.dtype for value in action.results]
        return made

    return emit_and_check


@pytest.fixture
def emissions_are_checked(monkeypatch):
    for registry in (emitter._emissions, emitter._programs_emissions):
        for kind, emission in list(registry.items()):
            monkeypatch.setitem(registry, kind, checked(emission))


@pytest.mark.usefixtures("emissions_are_checked")
@pytest.mark.parametrize("device", ("gpu", "cpu"))
@every_program
def test_what_runs_has_the_dtypes_that_the_plan_gives_it(program, device):
    fn = jamp.autocast(program.fn, device_type=device)
    jax.eval_shape(fn, *program.arguments())


@pytest.mark.usefixtures("emissions_are_checked")
def test_a_result_in_another_dtype_than_planned_is_found(monkeypatch):
    monkeypatch.setattr(
        emitter,
        "bound_as",
        lambda eqn, *others: (
            eqn.primitive,
            {**eqn.params, "preferred_element_type": np.dtype(np.float32)},
        ),
    )
    with pytest.raises(AssertionError):
        x = jnp.ones((2, 2), jnp.bfloat16)
        jamp.autocast(jnp.matmul, device_type="cpu")(x, x)


def test_planning_binds_nothing():
    x = jnp.ones((4, 4))
    program = jax.make_jaxpr(lambda x: jax.nn.softmax(x @ x))(x)

    def bound():
        plan_of(program, [x])
        return x

    assert not jax.make_jaxpr(bound)().eqns


def test_a_plan_runs_any_number_of_times():
    x = jnp.linspace(0, 1, 16).reshape(4, 4)
    program = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(x)
    plan = plan_of(program, [x])
    first, second = (emit(plan, [array])[0] for array in (x, x + 1))
    np.testing.assert_array_equal(first, jamp.autocast(lambda x: jnp.tanh(x @ x))(x))
    assert not np.array_equal(first, second)


def test_an_inner_program_that_is_called_twice_is_one_program():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    w = jnp.eye(4)
    rewritten = traced(jamp.autocast(lambda x: layer(layer(x, w), w)), w)
    calls = [eqn for eqn in equations(rewritten) if eqn.primitive.name == "jit"]
    third = traced(jamp.autocast(lambda x: layer(layer(layer(x, w), w), w)), w)
    again = [eqn for eqn in equations(third) if eqn.primitive.name == "jit"]
    assert len(calls) == 2
    # The first call takes float32, the others what it returns.
    assert again[1].params["jaxpr"] is again[2].params["jaxpr"]


def test_a_primitive_has_one_rule():
    with pytest.raises(ValueError, match=r"scan has a rule already: plan_scan"):
        structural("scan")(lambda equation: [])
    assert STRUCTURAL["scan"].__name__ == "plan_scan"


def test_every_structural_rule_has_an_emission():
    # These dissolve into the program around them, or are emitted as another kind.
    without = {"call", "call_hi_primitive", "closed_call", "eval_jaxpr", "remat_opt"}
    assert emitter._programs_emissions.keys() == STRUCTURAL.keys() - without


def test_a_diagnosis_widens_what_every_structural_rule_is_for():
    # These hold no program, or can't be bound in other dtypes.
    without = {"all_gather", "all_gather_invariant", "call_hi_primitive"}
    assert STRUCTURAL.keys() - CALLS.keys() - _HOLDERS == without


def test_a_kind_of_action_is_emitted_in_one_place():
    with pytest.raises(ValueError, match="is emitted already: _emit_cast"):
        emitter.emits(emitter.Cast)(lambda running, action, arrays: [])
    with pytest.raises(ValueError, match="is emitted already: emit_scan"):
        emitter.emits_programs("scan")(lambda running, action, arrays, varying: [])


def test_a_plan_prints_its_steps_with_the_dtypes_of_values():
    w = jnp.ones((4, 4))

    def fn(w):
        return jax.lax.cond(w[0, 0] > 0, lambda x: x @ w, jnp.sin, w) * 0.5

    lines = str(plan_of(jax.make_jaxpr(fn)(w), [w], "gpu")).splitlines()
    steps = [re.sub(r"%\d+", "%", line) for line in lines]
    f32, f16 = "%:float32[4,4]", "%:float16[4,4]"
    assert (steps[0], steps[-1]) == (f"take {f32}", f"give {f32}")
    assert f"{f32} = mul {f32}, %=0.5:float32[]" in steps
    assert f"    {f16} = Cast {f32}" in steps
    assert f"    {f16} = dot_general {f16}, {f16}, {f32}, {f32}" in steps
