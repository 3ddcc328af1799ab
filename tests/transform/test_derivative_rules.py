"""Derivative rules are asked for what JAX asks of them, and for nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from tables import check_each

import jamp

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


def closing_over_a_value_of_no_argument(x):
    return jamp.autocast(lambda: closing_over_an_argument(x, jnp.cos(jnp.eye(2))))()


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit])
def test_a_rule_that_closes_over_a_value_is_named_with_the_way_out(transform):
    gradient = jax.grad(closing_over_an_argument)(X, X)
    words = (
        "test_derivative_rules.py:.*closes over.*as an argument.*autocast\\(jax.grad"
    )
    with pytest.raises(jamp.JampError, match=words):
        transform(jax.grad(jamp.autocast(closing_over_an_argument)))(X, X)
    with pytest.raises(jamp.JampError, match=words):
        transform(jax.grad(closing_over_a_value_of_no_argument))(X)
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


def custom_vjp_product():
    @jax.custom_vjp
    def scores(q, k):
        return q @ k.T / 4096

    scores.defvjp(
        lambda q, k: (q @ k.T / 4096, (q, k)),
        lambda kept, g: (g @ kept[1] / 4096, g.T @ kept[0] / 4096),
    )
    return scores


def custom_jvp_product():
    @jax.custom_jvp
    def scores(q, k):
        return q @ k.T / 4096

    @scores.defjvp
    def rule(primals, tangents):
        (q, k), (dq, dk) = primals, tangents
        return q @ k.T / 4096, (dq @ k.T + q @ dk.T) / 4096

    return scores


@pytest.mark.parametrize("make", [custom_vjp_product, custom_jvp_product])
def test_a_policys_rule_for_a_function_holds_in_its_derivative_rules(make):
    scores = make()

    def loss(q):
        return jnp.mean(jax.nn.softmax(scores(q, q)) ** 2)

    q = jax.random.normal(jax.random.key(0), (32, 64)) * 200
    policy = jamp.Policy.load("gpu").with_rules(float32=[scores])
    rewritten = jamp.autocast(loss, device_type="gpu", policy=policy)
    for fn in (rewritten, jax.jit(rewritten)):
        found, expected = jax.value_and_grad(fn)(q), jax.value_and_grad(loss)(q)
        for actual, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-7)
    # In 16 bits they overflow.
    low = jax.value_and_grad(jamp.autocast(loss, device_type="gpu"))(q)[0]
    assert not jnp.isfinite(low)
