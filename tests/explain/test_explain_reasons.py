"""Reports: the rule that decided about an operation, and where it comes from."""

import re

import jax
import jax.numpy as jnp
import pytest

import jamp

X = jnp.ones((2, 8))


def test_a_disabled_region_is_given_as_the_reason():
    def fn(x):
        with jamp.autocast(enabled=False):
            return x @ x.T

    report = jamp.explain(fn, device_type="gpu")(X)
    (record,) = [r for r in report.records if r.primitive == "dot_general"]
    assert record.ruling.source == "region with enabled=False"
    assert "region with enabled=False" in str(report)


def test_cast_inputs_are_given_as_the_reason():
    @jamp.custom_fwd(cast_inputs=jnp.float32)
    def gram(x):
        return x @ x.T

    report = jamp.explain(gram, device_type="gpu")(X)
    (record,) = [r for r in report.records if r.primitive == "dot_general"]
    assert record.ruling.source == "cast_inputs=float32 of gram"


def test_a_scope_is_given_as_the_reason():
    def fn(x):
        with jax.named_scope("head"):
            return x @ x.T

    policy = jamp.Policy.load("gpu").scoped("head", "float32")
    report = jamp.explain(fn, policy=policy)(X)
    (record,) = [r for r in report.records if r.primitive == "dot_general"]
    assert record.ruling.source == "scope 'head' in gpu*"
    assert record.scope == ("head",)


@jax.jit
def disabled_gram(x):
    with jamp.autocast(enabled=False):
        return x @ x.T


@jax.jit
def gram_of_head(x):
    with jax.named_scope("head"):
        return x @ x.T


@pytest.mark.parametrize(
    ("gram", "source"),
    [
        (disabled_gram, "region with enabled=False"),
        (gram_of_head, "scope 'head' in gpu*"),
    ],
)
def test_what_decides_inside_of_a_listed_function_is_given_as_the_reason(gram, source):
    def listed(x):
        return gram(x) + 1

    policy = jamp.Policy.load("gpu").with_rules(lower=[listed])
    policy = policy.scoped("head", "float32")
    report = jamp.explain(lambda x: listed(x @ x.T @ x), policy=policy)(X)
    *_, inside = (r for r in report.records if r.primitive == "dot_general")
    assert inside.ruling.source == source
    unused = {entry.name for entry in report.unused if entry.added}
    assert unused == (set() if gram is gram_of_head else {"head"})


def test_an_outer_product_in_a_listed_function_is_no_matmul():
    def outer(x):
        return jnp.einsum("i,j->ij", x, x)

    policy = jamp.Policy.load("gpu").with_rules(lower=[outer])
    report = jamp.explain(outer, policy=policy)(X[0])
    assert report.low_byte_share == 1
    assert not report.matmuls


def test_what_the_policy_leaves_as_traced_says_so():
    report = jamp.explain(lambda x: x.astype(int) | 1, device_type="gpu")(X)
    (line,) = [line for line in str(report).splitlines() if line.startswith("or ")]
    assert line.split()[3] == "as_traced"


def test_blocks_with_long_names_are_told_apart():
    names = "encoderblock_0", "encoderdecoderblock_0", "decoderblock_10"

    def fn(x, *weights):
        for name, w in zip(names, weights, strict=True):
            with jax.named_scope(name), jax.named_scope("MlpBlock_0"):
                x = jnp.tanh(x @ w)
        return x

    report = jamp.explain(fn, device_type="gpu")(X, *[jnp.ones((8, 8))] * 3)
    places = {
        line.split()[4] for line in str(report).splitlines() if "MlpBlock_0" in line
    }
    assert len(places) == len(names)


X88 = jnp.ones((8, 8))
PROMOTED = {
    "beside float32": (lambda h, x: h + x, "add", "float32"),
    "beside constants": (lambda h, x: h + jnp.eye(8), "add", "float32"),
    "float32 number": (lambda h, x: h * x[0, 0], "mul", "float16"),
    "inexact constant": (lambda h, x: h * 0.9, "mul", "float16"),
    "constant out of range": (lambda h, x: h * 1e-9, "mul", "float32"),
    "constants out of range": (lambda h, x: h * 2.0**10 * 2.0**10, "mul", "float16"),
    "to one number": (lambda h, x: jnp.max(h), "reduce_max", "float32"),
    "adds up": (lambda h, x: jnp.zeros_like(h).at[0].add(h[0]), "scatter-add", ""),
    "gradient adds up": (lambda h, x: h[jnp.arange(3)], "gather", "float16"),
}


@pytest.mark.parametrize("why", PROMOTED)
def test_16_bits_that_are_promoted_are_given_the_reason(why):
    fn, primitive, result = PROMOTED[why]
    report = jamp.explain(lambda x: fn(x @ x, x), device_type="gpu")(X88)
    *_, found = (
        op for op in report.to_dict()["operations"] if op["primitive"] == primitive
    )
    assert found["note"] == why
    assert set(found["operands"]) - {"int32"} == {"float32"}
    assert not result or found["results"] == [result]
    assert f"({why})" in str(report)


@pytest.mark.parametrize(
    "fn", [lambda h, x: h * 2, lambda h, x: x * x[0, 0] * 0.9, lambda h, x: jnp.max(x)]
)
def test_what_computes_in_the_dtype_that_came_in_needs_no_reason(fn):
    report = jamp.explain(lambda x: fn(x @ x, x), device_type="gpu")(X88)
    assert not any(op["note"] for op in report.to_dict()["operations"])


def test_what_a_scope_decides_is_shown_by_the_functions_that_compute_it():
    def fn(x):
        with jax.named_scope("head"):
            return jax.nn.softmax(jax.nn.gelu(x @ x.T))

    policy = jamp.Policy.load("gpu").scoped("head", "float32")
    report = jamp.explain(fn, policy=policy)(X).text("module")
    rows = re.findall(r"- (\S+) +f32 ", report)
    assert rows == ["transpose", "dot_general", "jax.nn.gelu", "jax.nn.softmax"]


@jax.custom_vjp
def counting(count, x):
    count[...] += 1
    return x @ x.T


counting.defvjp(
    lambda count, x: (counting(count, x), x), lambda x, g: (None, (g + g.T) @ x)
)


def test_a_call_that_autocast_cannot_enter_is_told():
    def fn(x):
        return counting(jax.new_ref(jnp.zeros(())), x)

    report = jamp.explain(fn, device_type="gpu")(X)
    assert "ran as traced, with all that is inside: custom_vjp_call (1)" in (
        report.warnings
    )
    (row,) = [r for r in str(report).splitlines() if r.startswith("custom_vjp_call")]
    assert "custom_vjp_call runs only in the dtypes it was traced in" in row
    assert not jamp.explain(lambda x: x @ x.T, device_type="gpu")(X).warnings
