"""What stands in a derivative rule has the dtypes and the lines that it has outside."""

import jax
import jax.numpy as jnp
import pytest
from jaxprs import operand_dtypes, traced

import jamp
from jamp._equations.walks import equations

X = jnp.linspace(0.0, 1.0, 4).reshape(2, 2)


def listed(x, w):
    return x @ w


def widened(x, w):
    return jnp.sin(x.astype(jnp.float32) * w)


def as_it_comes(x, w):
    return jnp.sin(x * w)


def in_forward(helper):
    f = jax.custom_vjp(lambda x, w: x)
    f.defvjp(lambda x, w: (helper(x, w).astype(x.dtype), w), lambda w, g: (g, w))
    return f


def in_backward(helper):
    f = jax.custom_vjp(lambda x, w: x)
    f.defvjp(lambda x, w: (x, w), lambda w, g: (helper(g, w).astype(g.dtype), w))
    return f


def in_jvp(helper):
    f = jax.custom_jvp(lambda x, w: x)

    @f.defjvp
    def _(primals, tangents):
        x, w = primals
        return x, tangents[0] * helper(x, w).astype(x.dtype)

    return f


RULES = {"forward": in_forward, "backward": in_backward, "jvp": in_jvp}


def repeated(f):
    def looped(x, w):
        return jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0]

    return looped


HELD = {
    "by nothing": lambda f: f,
    "by jit": jax.jit,
    "by a loop": repeated,
    "by checkpoint": jax.checkpoint,
}


def pulled_back(f):
    """The result of a function and its gradients."""

    def run(x, w):
        out, pullback = jax.vjp(f, x, w)
        return out, pullback(jnp.cos(x).astype(out.dtype))

    return run


DIFFERENTIATED = {
    "outside": lambda f, policy: pulled_back(jamp.autocast(f, policy=policy)),
    "outside of jit": lambda f, policy: pulled_back(
        jax.jit(jamp.autocast(f, policy=policy))
    ),
    "inside": lambda f, policy: jamp.autocast(pulled_back(f), policy=policy),
}


@pytest.mark.parametrize("where", DIFFERENTIATED)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("rule", RULES)
def test_functions_and_casts_in_a_rule_are_known_as_outside(rule, held, where):
    policy = jamp.Policy.load("gpu").with_rules(float32=[listed])

    def operands(helper, dtype, primitive):
        fn = DIFFERENTIATED[where](HELD[held](RULES[rule](helper)), policy)
        x = X.astype(dtype)
        return set(operand_dtypes(traced(fn, x, x), primitive))

    assert operands(listed, "float32", "dot_general") == {("float32", "float32")}
    assert operands(jnp.matmul, "float32", "dot_general") == {("float16", "float16")}
    assert operands(widened, "bfloat16", "sin") == {("float32",)}
    assert operands(as_it_comes, "bfloat16", "sin") == {("bfloat16",)}


def disabled(x, w):
    with jamp.autocast(enabled=False):
        return x @ w


def calls_its_rules(f):
    """A function that a policy may list, around one with rules."""

    def around(x, w):
        return f(x, w)

    return around


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_the_rule_of_the_function_and_the_region_that_it_stands_in(
    rule, held
):
    gpu = jamp.Policy.load("gpu")

    def operands(helper, policy_of):
        around = calls_its_rules(RULES[rule](helper))
        fn = jamp.autocast(pulled_back(HELD[held](around)), policy=policy_of(around))
        return set(operand_dtypes(traced(fn, X, X), "dot_general"))

    low, high = {("float16", "float16")}, {("float32", "float32")}
    in_float32 = lambda around: gpu.with_rules(float32=[around])  # noqa: E731
    lowered = lambda around: gpu.with_rules(lower=[around], float32=[listed])  # noqa: E731
    assert operands(jnp.matmul, in_float32) == high
    assert operands(jnp.matmul, lowered) == low
    assert operands(listed, lowered) == high
    assert operands(disabled, lambda around: gpu) == high


def squared(x, w):
    return (x * x) @ w


@pytest.mark.parametrize("rule", RULES)
def test_an_operation_of_a_rule_is_reported_at_its_line(rule):
    fn = pulled_back(jax.jit(RULES[rule](squared)))
    rows = jamp.explain(fn, device_type="gpu")(X, X).to_dict()["operations"]
    found = {row["line"] for row in rows if row["primitive"] == "dot_general"}
    assert found == {squared.__code__.co_firstlineno + 1}


@pytest.mark.parametrize("first", ["under autocast", "as written"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_that_jax_keeps_serve_their_own_side_alone(rule, first):
    fn = pulled_back(jax.jit(RULES[rule](listed)))
    policy = jamp.Policy.load("gpu").with_rules(float32=[listed])
    sides = {"under autocast": jamp.autocast(fn, policy=policy), "as written": fn}
    order = sorted(sides, key=lambda side: side != first)
    found = {side: traced(sides[side], X, X) for side in order}
    under = operand_dtypes(found["under autocast"], "dot_general")
    assert set(under) == {("float32", "float32")}
    written = equations(found["as written"])
    names = {str(eqn.source_info.name_stack) for eqn in written}
    assert not any("jamp" in name for name in names)
