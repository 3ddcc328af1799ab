"""Random programs never fail under autocast, and stay near what float32 gives."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from evaluation import evaluated
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters.partial_eval import dce_jaxpr
from jaxprs import dtypes, is_float, matmul_dtypes, text, traced
from random_operations import EXTRAS, OPERATIONS, SHAPES, UNIT
from random_operations import arguments as drawn
from random_programs import (
    BRANCHES,
    FORMS,
    MAPS,
    Call,
    Form,
    Leaf,
    Program,
    autocast,
    programs,
)
from test_laws import split_floats, summed

import jamp

LOW_PAIRS = {(jnp.dtype(dtype).name,) * 2 for dtype in LOW.values()}
ENV = drawn()
# The bounds are of first order. What they leave out is of second order, thus smaller.
SECOND_ORDER = 2
# Roundings of float32.
SLACK = 2.0**-18


def rewritten(program, device):
    """A program under autocast."""
    return autocast(functools.partial(program, device=device), device)


def assert_near(actual, expected, bounds):
    """Same structure and shapes; every value within its bound, all else equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    assert all(x.shape == y.shape for x, y in pairs)
    np.testing.assert_array_equal(actual["count"], expected["count"])
    both = zip(actual["values"], expected["values"], bounds, strict=True)
    for x, y, bound in both:
        assert is_float(x)
        x, y = np.asarray(x, np.float32), np.asarray(y)
        assert y.dtype == np.float32
        assert np.isfinite(x).all()
        assert np.abs(x - y).max() <= SECOND_ORDER * bound.error


def differentiated(fn):
    """The gradients of a weighted sum of a program's values; no weight is above 1."""

    def run(env):
        floats, rebuild = split_floats((env,))
        return jax.grad(summed(lambda env: fn(env)["values"], rebuild))(floats)

    return run


def assert_gradients_near(actual, expected, allowed):
    """Float32, finite where they should be, and the sum of differences allowed."""
    assert set(dtypes(actual)) == {"float32"}
    total = 0
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape
        finite = np.isfinite(y)
        assert np.isfinite(x[finite]).all()
        total += np.abs(x - y)[finite].sum()
    assert total <= allowed


def check_values(program):
    expected = evaluated(program, ENV)
    for device, dtype in LOW.items():
        actual = evaluated(rewritten(program, device), ENV)
        assert_near(actual, expected, program.bounds(UNIT[dtype]))


def check_gradients(program):
    """A row of the Jacobian is off by `turn` at most, and is weighed by less than 1."""
    expected = evaluated(differentiated(program), ENV)
    for device, dtype in LOW.items():
        sizes = [math.prod(SHAPES[kind]) for kind in program.kinds]
        turns = [bound.turn for bound in program.bounds(UNIT[dtype])]
        allowed = sum(map(math.prod, zip(sizes, turns, strict=True)))
        actual = evaluated(differentiated(rewritten(program, device)), ENV)
        assert_gradients_near(actual, expected, SECOND_ORDER * allowed)
        as_written = functools.partial(program, device=device)
        inside = autocast(differentiated(as_written), device)
        found = [gradient.astype(jnp.float32) for gradient in evaluated(inside, ENV)]
        assert_gradients_near(found, expected, SECOND_ORDER * allowed)


def check_types(program):
    shape = jax.eval_shape(program, ENV)
    batch = ENV | {"x": jnp.stack([ENV["x"], ENV["y"]])}
    axes = ({name: 0 if name == "x" else None for name in ENV},)
    for device in LOW:
        fn = rewritten(program, device)
        types = jax.eval_shape(fn, ENV)
        inner = jax.jit(functools.partial(program, device=device))
        assert jax.eval_shape(jax.jit(fn), ENV) == types
        assert jax.eval_shape(autocast(inner, device), ENV) == types
        batched = jax.eval_shape(jax.vmap(fn, in_axes=axes), batch)
        assert dtypes(batched) == dtypes(types)
        assert jax.tree.map(lambda leaf: leaf.shape[1:], batched) == jax.tree.map(
            lambda leaf: leaf.shape, types
        )
        assert jax.tree.map(lambda leaf: leaf.shape, types) == jax.tree.map(
            lambda leaf: leaf.shape, shape
        )


def before_a_matmul(program):
    """`(first result @ w) @ u`, the first matmul in a disabled region."""
    inside = Call("matmul", (program.results[0], Leaf("w")))
    region = Form("region", "m", "c0", (inside,), Leaf("x"))
    return Program(("m",), (Call("matmul", (region, Leaf("u"))),))


def matmuls_read(jaxpr):
    """How many matmuls a program has that somebody reads."""
    read, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return len(matmul_dtypes(read))


def assert_matmuls_lowered(fn, program, count):
    """As many of a program's matmuls as told are in 16 bits, all others in float32.

    Those that nobody reads may be left out.
    """
    rewritten = traced(fn, ENV).jaxpr
    found = matmul_dtypes(rewritten)
    low = [pair for pair in found if pair != ("float32", "float32")]
    as_written = traced(program, ENV).jaxpr
    assert matmuls_read(rewritten) == matmuls_read(as_written)
    assert len(found) <= len(matmul_dtypes(as_written))
    assert len(low) == count
    assert all(pair in LOW_PAIRS for pair in low)


def check_regions(program):
    expected, mixed = evaluated(program, ENV), before_a_matmul(program)
    for device in LOW:
        disabled = jamp.autocast(program, device_type=device, enabled=False)
        assert text(disabled, ENV) == text(program, ENV)
        region = functools.partial(FORMS["region"], program)
        whole = autocast(region, device)
        assert_matmuls_lowered(whole, program, 0)
        jax.tree.map(np.testing.assert_array_equal, evaluated(whole, ENV), expected)
        # The backward pass of the matmul outside the region consists of two more.
        fn = rewritten(mixed, device)
        assert_matmuls_lowered(fn, mixed, 1)
        assert_matmuls_lowered(differentiated(fn), differentiated(mixed), 3)


def samples(takes, count):
    """Random operands, elements of which are on the border; weights are as drawn."""
    rng = np.random.default_rng(0)
    for seed in range(count):
        some = drawn(seed)
        operands = []
        for kind in takes:
            values = rng.uniform(-1, 1, SHAPES[kind])
            values = np.where(rng.random(SHAPES[kind]) < 0.3, np.sign(values), values)
            fixed = some[kind] if kind in "wk" else values
            operands.append(jnp.asarray(fixed, jnp.float32))
        yield operands


def largest(*arrays):
    return max(float(np.abs(np.asarray(a, np.float32)).max()) for a in arrays)


def in_16_bits(x):
    """The same values, which are in 16 bits under autocast."""
    return (x.reshape(-1, 1) @ jnp.ones((1, 1))).reshape(x.shape)


def check_amplification(op, fn, kinds):
    """Its gains and its curve, between random points."""
    slack = SLACK + 4 * op.unit
    for p, q in itertools.pairwise(samples(kinds, 4)):
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        left, right, centre = fn(*p), fn(*q), fn(*middle)
        apart = [largest(a - b) for a, b in zip(p, q, strict=True)]
        assert largest(left, right) <= 1 + slack
        gained = sum(map(math.prod, zip(op.gains, apart, strict=True)))
        assert largest(left - right) <= gained + slack
        bent = op.curve * len(kinds) * (max(apart) / 2) ** 2
        assert largest(left + right - 2 * centre) <= bent + slack


def check_roundings(op, fn, kinds):
    """Its error for operands that are exact in 16 bits."""
    for device, dtype in LOW.items():
        low = jamp.autocast(
            lambda *operands: fn(*map(in_16_bits, operands)), device_type=device
        )
        for point in samples(kinds, 2):
            exact = [operand.astype(dtype).astype(jnp.float32) for operand in point]
            off = evaluated(low, *exact).astype(jnp.float32) - fn(*exact)
            assert largest(off) <= op.roundings * max(UNIT[dtype], op.unit)


@pytest.mark.numbers
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_amplifies_errors_no_more_than_the_table_says(name):
    op = OPERATIONS[name]
    fn = functools.partial(op.fn, **{key: ENV[key] for key in EXTRAS[name]})
    kinds = op.takes.replace("*", "m")
    check_amplification(op, fn, kinds)
    check_roundings(op, fn, kinds)


NO_WHILE = programs(without=("while_loop",))
SMOOTH = programs(without=("while_loop", "grad"), smooth=True)
NOT_NESTED = programs(without=("while_loop", "autocast", "bfloat16"), kinds="m")

CHECKS = {
    "values": (check_values, programs(), 25),
    "gradients": (check_gradients, st.one_of(SMOOTH, NO_WHILE), 15),
    "types": (check_types, programs(), 20),
    "regions": (check_regions, NOT_NESTED, 15),
}


def run(name, times):
    check, strategy, examples = CHECKS[name]
    settings(max_examples=times * examples)(given(strategy)(check))()


@pytest.mark.once
@pytest.mark.parametrize("name", CHECKS)
def test_random_programs_keep_the_laws(name):
    run(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_many_random_programs_keep_the_laws(name):
    run(name, 30)


def of_dense(name):
    """A form of a dense layer."""
    c, w, b = map(Leaf, "cwb")
    body = Call("dense", (c, w, b)) if name in MAPS else Call("linear", (c, w, b))
    bodies = (body, c) if name in BRANCHES else (body,)
    return Program(("m",), (Form(name, "m", "c", bodies, Leaf("x")),))


def test_a_rule_without_a_gradient_for_some_operands_in_a_loop_in_a_branch():
    mean = Call("means", (Leaf("x"),))
    ruled = Form("custom_vjp", "v", "c3", (Leaf("c3"),), Leaf("c1"))
    branches = (mean, Form("scan", "v", "c3", (mean,), ruled))
    inner = Form("scan", "v", "c2", (Leaf("c1"),), Leaf("c1"))
    rows = Call("matmul", (Leaf("x"), Leaf("w")))
    body = Form("cond", "v", "c2", branches, inner)
    check_gradients(Program(("m",), (Form("map", "m", "c1", (body,), rows),)))


@pytest.mark.parametrize("name", FORMS)
def test_a_compiled_form_gives_what_its_equations_give(name):
    program = of_dense(name)
    fn, bounds = rewritten(program, "gpu"), program.bounds(UNIT[jnp.float16])
    compiled, single = jax.jit(fn)(ENV), evaluated(fn, ENV)
    assert dtypes(compiled) == dtypes(single)
    for actual in (compiled, single):
        assert_near(actual, jax.jit(program)(ENV), bounds)


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"region", "grad"}))
def test_a_matmul_is_lowered_in_every_form_but_a_disabled_region(name):
    program = of_dense(name)
    found = matmul_dtypes(traced(rewritten(program, "cpu"), ENV))
    assert set(found) == {("bfloat16", "bfloat16")}


def two_layers(first, second="u"):
    x, first, second = map(Leaf, ("x", first, second))
    return Program(("m",), (Call("matmul", (Call("matmul", (x, first)), second)),))


@each_device
def test_the_values_of_another_program_are_not_near(device):
    actual = evaluated(rewritten(two_layers("w"), device), ENV)
    bounds = two_layers("w").bounds(UNIT[LOW[device]])
    assert_near(actual, evaluated(two_layers("w"), ENV), bounds)
    for other in (two_layers("u"), two_layers("w", "w")):
        with pytest.raises(AssertionError):
            assert_near(actual, evaluated(other, ENV), bounds)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1e-2,
        lambda x: x.at[0, 0].set(jnp.nan),
        lambda x: x[:1],
        lambda x: x.astype(int),
    ],
    ids=["value", "nan", "shape", "dtype"],
)
def test_a_wrong_value_is_not_near(change):
    program = two_layers("w")
    right, bounds = evaluated(program, ENV), program.bounds(UNIT[jnp.float16])
    wrong = right | {"values": [change(value) for value in right["values"]]}
    with pytest.raises(AssertionError):
        assert_near(wrong, right, bounds)
    with pytest.raises(AssertionError):
        assert_near(right | {"count": right["count"] + 1}, right, bounds)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g * 1.5,
        lambda g: g.astype(jnp.float16),
        lambda g: g + np.float32(np.inf),
        lambda g: g[None],
    ],
    ids=["value", "dtype", "infinity", "shape"],
)
def test_wrong_gradients_are_not_near(change):
    right = evaluated(differentiated(two_layers("w")), ENV)
    (bound,) = two_layers("w").bounds(UNIT[jnp.float16])
    allowed = SECOND_ORDER * 16 * bound.turn
    assert_gradients_near(right, right, 0)
    with pytest.raises(AssertionError):
        assert_gradients_near([change(g) for g in right], right, allowed)


def test_a_matmul_that_should_be_lowered_or_kept_and_is_not_is_found():
    mixed = before_a_matmul(two_layers("w"))
    for fn, count in ((mixed, 1), (rewritten(two_layers("w"), "gpu"), 1)):
        with pytest.raises(AssertionError):
            assert_matmuls_lowered(fn, mixed, count)


def test_an_understated_operation_is_found():
    op = OPERATIONS["matmul"]
    check_amplification(op, op.fn, op.takes)
    check_roundings(op, op.fn, op.takes)
    for wrong in (op._replace(gains=(0.1, 0.4)), op._replace(curve=0.1)):
        with pytest.raises(AssertionError):
            check_amplification(wrong, op.fn, op.takes)
    with pytest.raises(AssertionError):
        check_roundings(op._replace(roundings=0.1), op.fn, op.takes)


@given(programs())
@settings(max_examples=20)
def test_a_program_prints_what_it_computes(program):
    printed = repr(program)
    used = [name for name in (*FORMS, *OPERATIONS) if f"{name}(" in printed]
    assert used
    assert "object at" not in printed
