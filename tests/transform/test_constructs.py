"""What loops, branches, checkpoints and derivative rules keep under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import remat, solvers
from constructs._construct import square
from constructs.derivatives import HiPrimitive, doubled_gradient, high_level
from constructs.loops import cond, scan, scan_reversed_and_unrolled
from jax import lax
from jaxprs import casts, equations, matmul_dtypes, primitives, traced
from test_construct_matrix import weighed

import jamp

X, W = square()


def gpu(fn):
    return jamp.autocast(fn, device_type="gpu")


def only_scan(program):
    (loop,) = [e for e in equations(program) if e.primitive.name == "scan"]
    return loop


def test_a_hidden_state_settles_in_16_bits_and_an_accumulator_in_float32():
    def fn(x, w):
        def step(carry, row):
            hidden, total = carry
            hidden = jnp.tanh(row @ w + hidden @ w)
            return (hidden, total + hidden.sum()), None

        return lax.scan(step, (jnp.zeros(4), 0.0), x)[0]

    hidden, summed = gpu(fn)(X, W)
    assert (hidden.dtype, summed.dtype) == (jnp.float16, jnp.float32)


def test_branches_meet_at_the_widest_dtype():
    assert gpu(cond)(X, W).dtype == jnp.float32


def test_the_cast_of_a_weight_stands_outside_the_loop():
    program = traced(gpu(scan), X[:2], W)
    narrowed = ("float32", "float16", W.shape)
    assert narrowed not in casts(only_scan(program).params["jaxpr"])
    assert casts(program).count(narrowed) == 1


def test_the_gradient_of_a_hoisted_weight_is_summed_in_float32():
    # In float16 the sum of 4096 ones would stop at 2048.
    def fn(w):
        return lax.scan(lambda c, row: (c, (row * 1) @ w), 0.0, jnp.ones((4096, 2)))[1]

    gradient = jax.grad(lambda w: gpu(fn)(w).astype(jnp.float32).sum())
    assert float(gradient(jnp.ones((2, 1)))[0, 0]) == 4096


def test_a_loop_keeps_its_parameters():
    loop = only_scan(traced(gpu(scan_reversed_and_unrolled), X, W))
    assert loop.params["reverse"]
    assert loop.params["unroll"] == 2
    assert loop.params["length"] == 4


def test_the_rule_of_a_custom_vjp_is_kept():
    by_rule = jax.grad(lambda x: weighed(gpu(doubled_gradient)(x, W)))(X)
    by_jax = jax.grad(lambda x: weighed(jnp.tanh(x @ W)))(X)
    np.testing.assert_allclose(by_rule, 2 * by_jax, atol=2e-2)


@pytest.mark.parametrize("custom", [jax.custom_vjp, jax.custom_jvp])
def test_a_region_holds_inside_a_derivative_rule(custom):
    @custom
    def fn(x):
        return x @ x

    def disabled(x, g):
        with jamp.autocast(enabled=False):
            return g @ x

    if custom is jax.custom_vjp:
        fn.defvjp(lambda x: (x @ x, x), lambda x, g: (disabled(x, g),))
    else:
        fn.defjvp(lambda x, t: (x[0] @ x[0], disabled(x[0], t[0])))
    gradient = jax.grad(lambda x: weighed(gpu(fn)(x)))
    assert sorted(matmul_dtypes(traced(gradient, X))) == [
        ("float16", "float16"),
        ("float32", "float32"),
    ]


@pytest.mark.parametrize("name", remat.POLICIES)
def test_a_checkpoint_recomputes_as_many_matmuls_as_without_autocast(name):
    fn = jax.checkpoint(remat.block, policy=remat.POLICIES[name])
    plain = jax.grad(lambda x, w: weighed(fn(x, w)), (0, 1))
    cast = jax.grad(lambda x, w: weighed(gpu(fn)(x, w)), (0, 1))
    expected = primitives(traced(plain, X, W))
    found = primitives(traced(cast, X, W))
    for primitive in ("dot_general", "tanh", "sin", "remat2"):
        assert found[primitive] == expected[primitive]


def test_policies_differ_in_what_they_recompute():
    def matmuls(policy):
        fn = jax.checkpoint(remat.block, policy=policy)
        return primitives(traced(jax.grad(lambda x: weighed(fn(x, W))), X))

    counts = {matmuls(policy)["dot_general"] for policy in remat.POLICIES.values()}
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x, w: high_level(x, w) @ w, "call_hi_primitive"),
        (remat.called_closed, None),
    ],
    ids=["hi_primitive", "closed_call"],
)
def test_a_call_is_reported_and_rewritten_inside(fn, name):
    if name is None:  # It is called eval_jaxpr in some releases of JAX.
        name = traced(fn, X, W).eqns[0].primitive.name
    records = jamp.explain(fn, device_type="gpu")(X, W).records
    assert name in [record.primitive for record in records]
    program = traced(gpu(fn), X, W)
    assert matmul_dtypes(program) == [("float16", "float16")] * 2


class OfOne(HiPrimitive):
    """Gives what is like its one operand, and keeps that for the backward pass."""

    def __init__(self, x):
        self.in_avals = (x,)
        self.out_aval = x
        self.params = {}
        super().__init__()

    def vjp_fwd(self, nonzero, x):
        return self(x), x


class Half(OfOne):
    """Half of a product, which refuses to be differentiated forward."""

    def expand(self, x):
        return x @ x / 2

    def jvp(self, primals, tangents):
        raise TypeError("backward alone")

    def vjp_bwd_retval(self, x, g):
        return ((g @ x.T + x.T @ g) / 2,)


def test_a_high_level_primitive_may_refuse_to_be_differentiated_forward():
    def loss(x):
        return jnp.sum(Half(jax.typeof(x))(x).astype(jnp.float32))

    actual, expected = (jax.grad(fn)(X) for fn in (gpu(loss), loss))
    assert matmul_dtypes(traced(gpu(loss), X)) == [("float16", "float16")]
    np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-2)


class Doubled(OfOne):
    """Twice what it takes, whose rules compute products."""

    def expand(self, x):
        return x * 2

    def vjp_bwd_retval(self, x, g):
        return (g @ x.T @ x,)


class DoubledForward(Doubled):
    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        return self(x), t @ x.T @ x


@pytest.mark.parametrize("kind", [Doubled, DoubledForward])
def test_products_in_the_rules_of_a_high_level_primitive_are_lowered(kind):
    def loss(x):
        return jnp.sum(kind(jax.typeof(x))(x).astype(jnp.float32))

    program = traced(jax.grad(gpu(loss)), X)
    actual, expected = (jax.grad(fn)(X) for fn in (gpu(loss), loss))
    assert set(matmul_dtypes(program)) == {("float16", "float16")}
    np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-2)


def test_what_the_policy_does_not_know_is_reported():
    report = jamp.explain(solvers.by_linear_call, device_type="gpu")(X, W)
    assert [record.primitive for record in report.unknown] == ["linear_call"]
    assert "linear_call (1)" in str(report)


@pytest.mark.parametrize("custom", [jax.custom_vjp, jax.custom_jvp])
@pytest.mark.parametrize("body", [lambda x: x @ x, lambda x: x * 2])
def test_a_derivative_rule_that_fails_fails_only_where_it_is_asked_for(custom, body):
    fn = custom(lambda x: body(x))

    def rule(*arguments):
        raise NotImplementedError("no gradient")

    if custom is jax.custom_vjp:
        fn.defvjp(lambda x: (fn(x), None), rule)
    else:
        fn.defjvp(rule)
    cast = jamp.autocast(fn, device_type="gpu")
    np.testing.assert_allclose(cast(X), body(X), rtol=2e-2, atol=2e-2)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda x: cast(x).astype(jnp.float32).sum())(X)


@jax.custom_jvp
def with_banned_rule(x):
    return x * 2


with_banned_rule.defjvp(lambda x, t: (with_banned_rule(*x), t[0] * jnp.tan(*x)))


@pytest.mark.parametrize("fn", [with_banned_rule, lambda x: high_level(x, W)])
def test_what_is_banned_in_a_derivative_rule_is_an_error_where_it_is_asked_for(fn):
    policy = jamp.Policy.load("gpu").with_rules(banned=["tan"])
    cast = jamp.autocast(fn, policy=policy)
    np.testing.assert_allclose(cast(X), fn(X), rtol=2e-2, atol=2e-2)
    if fn is with_banned_rule:
        with pytest.raises(jamp.BannedOpError, match="tan is banned"):
            jax.grad(lambda x: cast(x).astype(jnp.float32).sum())(X)


def test_what_a_custom_vjp_function_captures_has_no_gradient_as_in_jax():
    def fn(x, w):
        @jax.custom_vjp
        def product(x):
            return x @ w

        product.defvjp(lambda x: (product(x), None), lambda _, g: (g,))
        return product(x)

    def loss(w):
        return jamp.autocast(lambda x: fn(x, w), device_type="gpu")(X).sum()

    with pytest.raises(Exception, match="closed-over value"):
        jax.grad(loss)(W)
