"""Loops, branches, checkpoints, derivative rules and shards run under the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import casts, equations, matmul_dtypes, traced

import jamp

LOW = {"gpu": "float16", "cpu": "bfloat16"}
TOLERANCE = {"gpu": 2e-2, "cpu": 1.5e-1}
KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (4, 4))
W = jax.random.normal(KEYS[1], (4, 4)) / 2

each_device = pytest.mark.parametrize("device", ["gpu", "cpu"])


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _backward(residuals, g):
    x, w, y = residuals
    g = g * (1 - y * y)
    return 2 * (g @ w.T), x.T @ g


doubled_gradient.defvjp(_forward, _backward)


def on_one_shard(x, w):
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1,), ("i",), axis_types=(kind,))
    specs = (jax.P("i"), jax.P())
    body = lambda x, w: lax.psum(jnp.tanh(x @ w).sum(0), "i")  # noqa: E731
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P())(x, w)


def stacked(x, w):
    layers = jnp.stack([w, w.T, w])
    return lax.scan(lambda c, layer: (jnp.tanh(c @ layer), c), x, layers)


CONSTRUCTS = {
    "scan": lambda x, w: lax.scan(
        lambda c, _: (jnp.tanh(c @ w), c.mean()), x, None, length=3
    ),
    "scan_reversed_and_unrolled": lambda x, w: lax.scan(
        lambda c, row: (jnp.tanh(c @ w) + row, row @ w),
        x,
        x,
        reverse=True,
        unroll=2,
    ),
    "scan_over_layers": stacked,
    "scan_with_a_carry_made_inside": lambda x, w: lax.scan(
        lambda c, row: (c + row @ w, None), jnp.zeros(4), x
    )[0],
    "fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "map": lambda x, w: lax.map(lambda row: row @ w, x),
    "associative_scan": lambda x, w: lax.associative_scan(
        jnp.matmul, jnp.stack([w, x, w])
    ),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x),
    "switch": lambda x, w: lax.switch(
        1, [lambda x: x, lambda x: x @ w, lambda x: x @ w.T], x
    ),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
    "checkpoint_with_a_policy": lambda x, w: jax.checkpoint(
        lambda x: jnp.sin(x @ w) @ w,
        policy=jax.checkpoint_policies.dots_saveable,
    )(x),
    "checkpoint_in_scan": lambda x, w: lax.scan(
        jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None)), x, None, length=3
    )[0],
    "custom_vjp": doubled_gradient,
    "custom_vjp_in_scan": lambda x, w: lax.scan(
        lambda c, _: (doubled_gradient(c, w), None), x, None, length=2
    )[0],
    "jit_in_cond_in_scan": lambda x, w: lax.scan(
        lambda c, i: (
            lax.cond(i > 1, jax.jit(lambda c: jnp.tanh(c @ w)), jnp.sin, c),
            i,
        ),
        x,
        jnp.arange(3),
    )[0],
    "shard_map": on_one_shard,
}


def total(fn):
    def summed(x, w):
        leaves = jax.tree.leaves(fn(x, w))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    return summed


def distance(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(np.abs(np.asarray(a, float) - np.asarray(b)).max() for a, b in pairs)


def assert_lowered(program, device):
    found = matmul_dtypes(program)
    assert found
    assert set(found) == {(LOW[device], LOW[device])}


@each_device
@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_construct_runs_in_16_bits(name, device, outside):
    fn = CONSTRUCTS[name]
    cast = jamp.autocast(fn, device_type=device)
    assert_lowered(traced(cast, X, W), device)
    assert distance(outside(cast)(X, W), fn(X, W)) < TOLERANCE[device]


@each_device
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_gradient_of_a_construct_runs_in_16_bits(name, device):
    fn = CONSTRUCTS[name]
    gradient = jax.grad(total(jamp.autocast(fn, device_type=device)), (0, 1))
    assert_lowered(traced(gradient, X, W), device)
    actual = gradient(X, W)
    assert [leaf.dtype for leaf in actual] == [jnp.float32, jnp.float32]
    assert distance(actual, jax.grad(total(fn), (0, 1))(X, W)) < TOLERANCE[device]


def test_the_distance_of_other_results_is_found():
    assert distance(CONSTRUCTS["map"](X, W), CONSTRUCTS["map"](X, 2 * W)) > 0.5


@each_device
def test_a_while_loop_runs_in_16_bits(device):
    def fn(x, w):
        step = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]

    cast = jamp.autocast(fn, device_type=device)
    assert_lowered(traced(cast, X, W), device)
    assert cast(X, W).dtype == LOW[device]
    assert distance(cast(X, W), fn(X, W)) < TOLERANCE[device]


def test_a_hidden_state_settles_in_16_bits_and_an_accumulator_in_float32():
    def fn(x, w):
        def step(carry, row):
            hidden, total = carry
            hidden = jnp.tanh(row @ w + hidden @ w)
            return (hidden, total + hidden.sum()), None

        return lax.scan(step, (jnp.zeros(4), 0.0), x)[0]

    hidden, summed = jamp.autocast(fn, device_type="gpu")(X, W)
    assert (hidden.dtype, summed.dtype) == (jnp.float16, jnp.float32)


def test_branches_meet_at_the_widest_dtype():
    fn = CONSTRUCTS["cond"]
    assert jamp.autocast(fn, device_type="gpu")(X, W).dtype == jnp.float32


def test_the_cast_of_a_weight_stands_outside_the_loop():
    program = traced(jamp.autocast(CONSTRUCTS["scan"], device_type="gpu"), X, W)
    (loop,) = [e for e in equations(program) if e.primitive.name == "scan"]
    narrowed = ("float32", "float16", W.shape)
    assert narrowed not in casts(loop.params["jaxpr"])
    assert casts(program).count(narrowed) == 2  # the weight, and x


def test_the_gradient_of_a_hoisted_weight_is_summed_in_float32():
    # In float16 the sum of 4096 ones would stop at 2048.
    def fn(w):
        return lax.scan(lambda c, row: (c, (row * 1) @ w), 0.0, jnp.ones((4096, 1)))[1]

    cast = jamp.autocast(fn, device_type="gpu")
    gradient = jax.grad(lambda w: cast(w).astype(jnp.float32).sum())(jnp.ones((1, 1)))
    assert float(gradient[0, 0]) == 4096


def test_the_rule_of_a_custom_vjp_is_kept():
    cast = jamp.autocast(doubled_gradient, device_type="gpu")
    by_rule = jax.grad(total(cast))(X, W)
    by_jax = jax.grad(total(lambda x, w: jnp.tanh(x @ w)))(X, W)
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
    gradient = jax.grad(total(lambda x, w: jamp.autocast(fn, device_type="gpu")(x)))
    assert sorted(matmul_dtypes(traced(gradient, X, W))) == [
        ("float16", "float16"),
        ("float32", "float32"),
    ]


def test_a_loop_keeps_its_parameters():
    program = traced(
        jamp.autocast(CONSTRUCTS["scan_reversed_and_unrolled"], device_type="gpu"), X, W
    )
    (loop,) = [e for e in equations(program) if e.primitive.name == "scan"]
    assert loop.params["reverse"]
    assert loop.params["unroll"] == 2
    assert loop.params["length"] == 4


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_disabled_region_holds_inside_a_construct(name):
    def fn(x, w):
        with jamp.autocast(enabled=False):
            return CONSTRUCTS[name](x, w)

    program = traced(jamp.autocast(fn, device_type="gpu"), X, W)
    assert set(matmul_dtypes(program)) == {("float32", "float32")}
