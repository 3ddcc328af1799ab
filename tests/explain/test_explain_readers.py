"""What reports say of readers in float32, held to the program that is emitted."""

from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params
from jaxprs import LOW, factors, traced
from terminals import shown
from test_explain import cells

import jamp

X, W, B = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8)
CALLS = {"custom_jvp_call", "custom_vjp_call", "jit", "remat2"}


class Emitted:
    """The operations of a program and of all that it calls."""

    def __init__(self, program):
        self._made = []
        self._read = defaultdict(set)  # the dtypes in which each value is read
        values = [object() for _ in program.jaxpr.invars]
        for var, value in self._run(program.jaxpr, values):
            self._read[value].add(var.aval.dtype.name)

    def operations(self):
        """The primitive of each, dtypes of its operands, those that it returns."""
        return Counter(
            (
                eqn.primitive.name,
                tuple(var.aval.dtype.name for var in factors(eqn)),
                tuple(sorted({name for v in values for name in self._read[v]})),
            )
            for eqn, values in self._made
        )

    def _run(self, jaxpr, values):
        """Goes through a program; gives its results, and their values."""
        known = dict(zip(jaxpr.invars, values, strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CALLS:
                inner, *_ = jaxprs_in_params(eqn.params)
                taken = [isinstance(v, Literal) or known[v] for v in eqn.invars]
                made = [value for _, value in self._run(inner, taken)]
            else:
                made = [object() for _ in eqn.outvars]
                self._equation(eqn, known, made)
            known.update(zip(eqn.outvars, made, strict=True))
        return [(var, known[var]) for var in jaxpr.outvars]

    def _equation(self, eqn, known, made):
        """Notes how an equation reads what it takes; a cast to 16 bits rounds that."""
        casts = eqn.primitive.name == "convert_element_type"
        for var in factors(eqn):
            if not isinstance(var, Literal):
                (result, *_) = eqn.outvars
                rounds = casts and result.aval.dtype in LOW
                found = result if rounds else var
                self._read[known[var]].add(found.aval.dtype.name)
        if not casts:
            self._made.append((eqn, made))


def reported(fn, *args):
    """The same of a report."""
    report = jamp.explain(fn, device_type="gpu")(*args)
    return Counter(
        (op["primitive"], tuple(op["operands"]), tuple(sorted(op["returns"])))
        for op in report.to_dict()["operations"]
        if op["primitive"] not in CALLS
    )


def biased(x, w, b):
    return jax.nn.gelu(x @ w + b)


def variance(x, w, b):
    h = x @ w
    return jnp.mean((h - jnp.mean(h, -1, keepdims=True)) ** 2)


def residual(x, w, b):
    h = x @ w
    return jax.nn.gelu(h) + h


def read_twice(x, w, b):
    h = jax.nn.gelu(x @ w)
    return h @ w, jnp.mean(h)


def largest(x, w, b):
    return jnp.argmax(x @ w + b, -1)


def scaled(x, w, b):
    h = x @ w
    return h * jax.nn.sigmoid(1.7 * h)


def jitted(x, w, b):
    return jax.nn.softmax(jax.jit(lambda h: jnp.maximum(h * 0.3 + 1, 0) * h)(x @ w))


def jitted_product(x, w, b):
    return jnp.mean(jax.jit(lambda h: jnp.tanh(h @ w))(x @ w))


def transposed(x, w, b):
    h = jax.nn.gelu(x @ w).T
    return jax.nn.softmax(h)


PROGRAMS = (
    biased,
    variance,
    residual,
    read_twice,
    largest,
    scaled,
    jitted,
    jitted_product,
    transposed,
)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_operations_take_and_return_the_dtypes_of_the_emitted_program(fn):
    program = traced(jamp.autocast(fn, device_type="gpu"), X, W, B)
    assert reported(fn, X, W, B) == Emitted(program).operations()


def noted(fn, *args):
    """The rows of a report that have a note, by operation."""
    rows = cells(jamp.explain(fn, device_type="gpu")(*args))
    return {row["operation"]: row for row in rows if "(" in row["why"]}


@pytest.mark.parametrize(
    ("fn", "notes"),
    [
        (biased, {"add": "promote (read in float32 by gelu)"}),
        (
            variance,
            {
                "jax.numpy.mean": "internal_float32 (read in float32 by sub, ...)",
                "sub": "promote (read in float32 by integer_pow)",
            },
        ),
        (
            residual,
            {
                "jax.nn.gelu": "internal_float32 (read in float32 by add)",
                "add": "promote (reads what was not rounded)",
            },
        ),
        (read_twice, {"jax.nn.gelu": "internal_float32 (read in float32 by mean)"}),
        (jitted_product, {"tanh": "promote (read in float32)"}),
        (
            largest,
            {
                "add": "promote (read in float32 by argmax)",
                "argmax": "promote (reads what was not rounded)",
            },
        ),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_an_operation_that_is_not_as_its_rule_says_tells_why(fn, notes):
    found = noted(fn, X, W, B)
    assert {name: row["why"] for name, row in found.items()} == notes


def test_what_is_read_rounded_and_not_returns_both():
    assert noted(read_twice, X, W, B)["jax.nn.gelu"]["returns"] == "f16+f32"


@jax.custom_jvp
def logit(x):
    return jnp.log(x / (1 - x))


logit.defjvps(lambda tangent, _, x: tangent / (x * (1 - x)))


def test_a_function_that_runs_in_float32_as_a_whole_says_so():
    found = noted(lambda x: logit(x @ x), W)
    why = {found[name]["why"] for name in ("custom_jvp_call", "sub", "div")}
    assert why == {"promote (its function runs in float32)"}
    assert "log" not in found  # its rule is float32


def test_equations_of_one_line_that_readers_tell_apart_have_lines_of_their_own():
    def fn(x):
        h = x @ x
        return (h * 2) @ x, jax.nn.gelu(h * 3)

    rows = cells(jamp.explain(fn, device_type="gpu")(W))
    found = [(row["returns"], row["why"]) for row in rows if row["operation"] == "mul"]
    assert found == [("f16", "promote"), ("f32", "promote (read in float32 by gelu)")]


def test_every_form_of_a_report_says_who_reads_in_float32():
    report = jamp.explain(biased, device_type="gpu")(X, W, B)
    note = "read in float32 by jax.nn.gelu"
    (add,) = (op for op in report.to_dict()["operations"] if op["note"])
    assert (add["primitive"], add["note"], add["returns"]) == ("add", note, ["float32"])
    assert f"promote: add in gpu; {note}" in report.to_html()
    assert "read in float32 by gelu" in report.text("equation")
    words = shown(report, 80).split()
    assert " ".join(words).count("(read in") == 1


def test_a_rounding_that_nobody_reads_is_not_told_as_one():
    def fn(x):
        return jnp.sum(jax.nn.sigmoid(x @ x))

    report = jamp.explain(fn, device_type="cpu")(W)
    (op,) = (o for o in report.to_dict()["operations"] if o["primitive"] == "logistic")
    assert (op["results"], op["returns"]) == (["float32"], ["float32"])
    assert "bfloat16" not in op["result_bytes"]
