"""Derivative rules are asked for what JAX asks of them, and for nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax.custom_derivatives import SymbolicZero
from jax.experimental.ode import odeint
from jax.extend.core import Primitive, jaxpr_as_fun
from jaxprs import dtypes, operand_dtypes, traced
from tables import check_each

import jamp
from jamp._equations import equations

X = jnp.linspace(0.0, 1.0, 4).reshape(2, 2)


def is_zero(tangent):
    return isinstance(tangent, SymbolicZero)


def filled(tangent):
    return jnp.zeros(tangent.shape, tangent.dtype) if is_zero(tangent) else tangent


def with_vjp(seen, symbolic_zeros):
    """A function whose rules note what is perturbed and which cotangents are zeros."""

    @jax.custom_vjp
    def f(x, w, n):
        return jnp.sin(x) @ w, x * 2 + n, n + 1

    def fwd(x, w, n):
        if symbolic_zeros:
            seen.append([operand.perturbed for operand in (x, w, n)])
            x, w, n = x.value, w.value, n.value
        return f(x, w, n), (x, w)

    def bwd(residuals, cotangents):
        seen.append([is_zero(ct) for ct in cotangents])
        (x, w), (a, b, _) = residuals, cotangents
        return (filled(a) @ w.T) * jnp.cos(x) + 2 * filled(b), None, None

    f.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
    return f


def with_jvp(seen, symbolic_zeros):
    """A function whose rule notes which tangents are zeros."""

    @jax.custom_jvp
    def f(x, w, n):
        return jnp.sin(x) @ w, x * 2 + n

    def rule(primals, tangents):
        seen.append([is_zero(tangent) for tangent in tangents])
        (x, w, n), (dx, dw, _) = primals, tangents
        product = (filled(dx) * jnp.cos(x)) @ w + jnp.sin(x) @ filled(dw)
        return f(x, w, n), (product, dx if is_zero(dx) else 2 * dx)

    f.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return f


def in_scan(f):
    def looped(*operands):
        def body(carry, _):
            return [c + r for c, r in zip(carry, f(*operands)[:2], strict=True)], None

        return jax.lax.scan(body, [jnp.zeros((2, 2))] * 2, None, length=2)[0]

    return looped


AROUND = {
    "nothing": lambda f: f,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
}


@pytest.mark.parametrize("symbolic_zeros", [True, False])
@pytest.mark.parametrize("make", [with_vjp, with_jvp])
def test_a_rule_sees_the_operands_and_cotangents_that_it_sees_without(
    make, symbolic_zeros
):
    def seen_by(row, transform):
        around, results, argnums = row
        seen = []

        def loss(x, w, n):
            f = AROUND[around](make(seen, symbolic_zeros))
            return sum(jnp.sum(f(x, w, n)[result]) for result in results)

        jax.eval_shape(jax.grad(transform(loss), argnums), X, X, 3)
        return {tuple(entry) for entry in seen}

    def check(row):
        assert seen_by(row, jamp.autocast) == seen_by(row, lambda fn: fn)

    results, argnums = [(0,), (1,)], [(0,), (1,), (0, 1)]
    check_each(itertools.product(AROUND, results, argnums), check)


def refusing():
    """The identity, which refuses a cotangent that is no symbolic zero."""
    f = jax.custom_vjp(lambda x: x)

    def bwd(_, cotangent):
        assert is_zero(cotangent)
        return (None,)

    f.defvjp(lambda x: (x.value, None), bwd, symbolic_zeros=True)
    return f


def with_no_gradient(x, w):
    return with_vjp([], True)(x, w, 0)[0]


def with_no_tangent(x, w):
    @jax.custom_jvp
    def f(x, w):
        return w @ x, w * 2

    def rule(primals, tangents):
        dx, dw = tangents
        return f(*primals), (primals[1] @ dx, SymbolicZero(dw.aval))

    f.defjvp(rule, symbolic_zeros=True)
    return sum(f(x, w))


@pytest.mark.parametrize("f", [with_no_gradient, with_no_tangent])
def test_no_gradient_flows_to_where_a_rule_gives_none(f):
    def loss(x, w):
        return jnp.sum(f(x, refusing()(w)))

    found = jax.grad(jamp.autocast(loss), argnums=(0, 1))(X, X)
    expected = jax.grad(loss, argnums=(0, 1))(X, X)
    for gradient, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=2e-2)


def test_a_derivative_that_does_not_depend_on_the_tangent_is_kept():
    threes = jnp.full_like(X, 3.0)
    forward, backward = jax.custom_jvp(lambda x: x), jax.custom_vjp(lambda x: x)
    forward.defjvp(lambda primals, _: (primals[0], threes))
    backward.defvjp(lambda x: (x, None), lambda _, g: (threes,))
    _, tangent = jax.jvp(jamp.autocast(forward), (X,), (X,))
    gradient = jax.grad(jamp.autocast(lambda x: jnp.sum(backward(x))))(X)
    np.testing.assert_array_equal([tangent, gradient], [threes, threes])


def closing_over_an_argument(x, w):
    """A function whose backward rule reads an argument of the function around it."""
    product = jax.custom_vjp(lambda x: x @ w)
    product.defvjp(lambda x: (product(x), None), lambda _, g: (g @ w.T,))
    return jnp.sum(product(x))


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit])
def test_a_rule_that_closes_over_an_argument_is_named_with_the_way_out(transform):
    gradient = jax.grad(closing_over_an_argument)(X, X)
    words = (
        "test_derivative_rules.py:.*closes over.*as an argument.*autocast\\(jax.grad"
    )
    with pytest.raises(jamp.JampError, match=words):
        transform(jax.grad(jamp.autocast(closing_over_an_argument)))(X, X)
    inside = transform(jamp.autocast(jax.grad(closing_over_an_argument)))(X, X)
    np.testing.assert_allclose(inside, gradient, rtol=2e-2)


# As other libraries do, it keeps a program among other data, and runs it with constants
# that it takes as operands: those of the program itself are of no account.
held_program = Primitive("held_program")
held_program.def_abstract_eval(lambda x, *_, static: x)


@held_program.def_impl
def run_held(x, *constants, static):
    _, program = static
    return jaxpr_as_fun(program.replace(consts=constants))(x)[0]


def holding_a_program(x, w):
    product = jax.custom_jvp(lambda x, w: x @ w)

    @product.defjvp
    def rule(primals, tangents):
        held = "product", jax.make_jaxpr(lambda x: x @ w)(x)
        tangent = held_program.bind(tangents[0], primals[1], static=held)
        return product(*primals), tangent

    return product(x, w)


def test_a_program_in_the_data_of_another_library_may_close_over_a_value():
    along = lambda fn: jax.jvp(lambda x: fn(x, X), (X,), (X,))[1]  # noqa: E731
    found = along(jamp.autocast(holding_a_program, device_type="gpu"))
    np.testing.assert_allclose(found, along(holding_a_program), rtol=2e-3)


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit, jax.vmap])
def test_a_rule_may_close_over_what_is_traced_outside_of_autocast(transform):
    def gradient(w):
        return jax.grad(jamp.autocast(lambda x: closing_over_an_argument(x, w)))(X)

    w = jnp.stack([X, X + 1])
    expected = jnp.broadcast_to(w.sum(-1)[:, None], (2, 2, 2))
    if transform is not jax.vmap:
        w, expected = w[0], expected[0]
    np.testing.assert_allclose(transform(gradient)(w), expected, rtol=2e-2)


TABLE = jnp.array([[1.0, 2.0], [0.5, 3.0]])
turned = jax.custom_vjp(lambda x: jnp.sin(x * TABLE))
turned.defvjp(lambda x: (turned(x), x), lambda x, g: (g * jnp.cos(x * TABLE) * TABLE,))
around = jax.custom_vjp(lambda x: jnp.sum(turned(x)))
around.defvjp(lambda x: (around(x), x), lambda x, g: (g * turned(x),))


def twice(fn):
    return jax.grad(lambda x: jnp.sum(jax.grad(fn)(x) ** 2))


BATCHED_OR_DIFFERENTIATED = {
    "vmap_of_jit": (jax.grad, lambda x: jnp.sum(jax.vmap(jax.jit(turned))(x[None]))),
    "vmap_of_scan": (
        jax.grad,
        lambda x: jnp.sum(
            jax.vmap(
                lambda x: jax.lax.scan(lambda c, _: (turned(c), None), x, None, 2)[0]
            )(x[None])
        ),
    ),
    "backward_rule": (twice, around),
}


@pytest.mark.parametrize("within", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", BATCHED_OR_DIFFERENTIATED)
def test_what_jax_has_batched_or_differentiated_may_close_over_arrays(name, within):
    gradient, fn = BATCHED_OR_DIFFERENTIATED[name]
    found = within(gradient(jamp.autocast(fn)))(X)
    np.testing.assert_allclose(found, gradient(fn)(X), rtol=1e-5)


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


@rounded.defjvp
def _of_rounded(primals, tangents):
    return rounded(*primals), jnp.zeros_like(tangents[0])


@jax.custom_jvp
def sine_and_sign(x):
    return jnp.sin(x), (x > 0).astype(jnp.int32)


@sine_and_sign.defjvp
def _of_sine_and_sign(primals, tangents):
    sine, sign = sine_and_sign(*primals)
    no_tangent = np.zeros(sign.shape, jax.dtypes.float0)
    return (sine, sign), (jnp.cos(primals[0]) * tangents[0], no_tangent)


def signed_sine(x):
    sine, sign = sine_and_sign(x)
    return sine * sign.astype(sine.dtype)


ZERO_TANGENTS = {"of one result": rounded, "of an integer beside it": signed_sine}


@pytest.mark.parametrize("name", ZERO_TANGENTS)
@pytest.mark.parametrize("within", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_a_rule_may_give_a_tangent_of_zero(name, within):
    def loss(x):
        return jnp.sum(ZERO_TANGENTS[name](x @ x) + x @ x)

    x = jnp.full((2, 2), 0.5)
    wanted = jax.grad(loss)(x)
    found = jax.grad(within(jamp.autocast(loss, dtype=jnp.bfloat16)))(x)
    np.testing.assert_allclose(found, wanted, rtol=0.02)
    _, tangent = jax.jvp(jamp.autocast(loss, dtype=jnp.bfloat16), (x,), (x,))
    np.testing.assert_allclose(tangent, jnp.sum(wanted * x), rtol=0.02)


@pytest.mark.parametrize("length", [0, 3])
def test_operands_of_an_extended_dtype_have_the_gradients_of_the_rule(length):
    """Those of Flax's fp8 are scales and histories, which take the place of the old."""

    def quantized(x, scale, history):
        kept = [a.astype(fp8_ops.fp32_max_grad) for a in (scale, history)]

        def step(x, _):
            return fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, *kept), None

        x, _ = jax.lax.scan(step, x, None, length) if length else step(x, None)
        return jnp.sum(x**2)

    arguments = jnp.array([1.5, -2.0]), jnp.ones(1), jnp.zeros(3)
    by_autocast = jamp.autocast(quantized, device_type="gpu")
    actual, wanted = (
        jax.grad(f, (0, 1, 2))(*arguments) for f in (by_autocast, quantized)
    )
    for x, y in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3)


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


@pytest.mark.skipif(
    not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="it needs JAX 0.11.2"
)
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("within", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_what_a_backward_rule_logs_is_logged(within, loop):
    product = jax.custom_vjp(lambda x, w: x @ w)

    def bwd(kept, g):
        x, w = kept
        return (g @ w.T, x.T @ g), {"norm": jnp.linalg.norm(g), "kept": [x]}

    product.defvjp_with_logs(lambda x, w: (product(x, w), (x, w)), bwd)

    def stack(x, w):
        if loop:
            return jax.lax.scan(lambda x, w: (product(x, w), None), x, w)[0]
        return product(x, w[0])

    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    arguments = x, jnp.stack([x.T, x + 0.5])

    def gradients_and_logs(fn):
        _, pullback = jax.vjp(within(fn), *arguments)
        return pullback.with_logs(
            jnp.ones((4, 4), jax.eval_shape(fn, *arguments).dtype)
        )

    found = gradients_and_logs(jamp.autocast(stack, device_type="cpu"))
    wanted = gradients_and_logs(stack)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for actual, expected in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=0.02)


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


@jax.custom_jvp
def weighed(x, w):
    return jnp.exp(jnp.outer(x, x) @ w.astype(x.dtype))


@weighed.defjvp
def weighed_jvp(primals, tangents):
    return jax.jvp(weighed.fun, primals, tangents)


def along_an_ode(x, w):
    return odeint(
        lambda y, t, w: -(y * w).astype(y.dtype), x, jnp.linspace(0.0, 1.0, 3), w
    )


@pytest.mark.parametrize(
    "function", [lambda x, w: twice(x) * twice(w), weighed, along_an_ode]
)
@pytest.mark.parametrize(
    "dtypes", [("float64", "float64"), ("float32", "float64"), ("float64", "float32")]
)
def test_float64_has_its_gradients_through_rules(function, dtypes):
    with jax.enable_x64(True):
        arrays = [jnp.asarray([0.5, 1.5], dtype) for dtype in dtypes]

        def loss(x, w):
            return jnp.sum(function(x, w))

        plain = jax.grad(loss, (0, 1))(*arrays)
        cast = jax.grad(jamp.autocast(loss), (0, 1))(*arrays)
        for of_plain, of_cast in zip(plain, cast, strict=True):
            assert of_cast.dtype == of_plain.dtype
            np.testing.assert_allclose(of_cast, of_plain, rtol=0.01)


scaled = jax.custom_vjp(lambda x, scale: x * scale)
scaled.defvjp(
    lambda x, scale: (x * scale, (x, scale)),
    # JAX takes a gradient in float64 of a float32 operand as it is.
    lambda taken, ct: (ct * taken[1], jnp.sum(ct * taken[0])),
)


def test_a_float64_gradient_of_an_operand_in_float32_is_cast_to_its_dtype():
    with jax.enable_x64(True):
        x, w = (np.eye(2, dtype=np.float32) + k for k in range(2))

        def loss(x, w, scale):
            product = x @ w
            return jnp.sum(scaled(product, scale)) + jnp.sum(product)

        given = x, w, np.float64(3.0)
        found = jax.grad(jamp.autocast(loss), (0, 1, 2))(*given)
        assert dtypes(found) == ("float32", "float32", "float64")
        wanted = jax.grad(lambda x, w, s: jnp.sum(x @ w) * (s + 1), (0, 1, 2))(*given)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
