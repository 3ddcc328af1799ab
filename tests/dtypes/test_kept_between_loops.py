"""What a loop or a branch keeps for its gradient, where both are under autocast.

`autocast(grad(f))` is handed a program in which JAX has split the loop: the first half
leaves what the second reads. In softmax's gradient terms cancel by as much as the
numbers that it is taken of have in common: each rounded by itself, they would leave
nothing of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs.sharding import mesh
from devices import each_device
from jax import P, lax

import jamp
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

BATCH = 4
COMMON = 30.0  # what softmax's gradient ignores
# The spacing of bfloat16 at 1: roundings of products and of what they multiply.
TOLERANCE = 2.0**-7


def by_hand(z):
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(z):
    centred = z - z.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "softmax by hand": by_hand,
    "exp of log_softmax": lambda z: jnp.exp(jax.nn.log_softmax(z)),
    "standardize": jax.nn.standardize,
    "layer norm by hand": layer_norm,
}


def scanned(body):
    def fn(w, xs):
        start = jnp.zeros((), xs.dtype)
        return lax.scan(lambda total, x: (total + body(w, x), None), start, xs)[0]

    return fn


def nested(body):
    inner = scanned(body)
    return lambda w, xs: scanned(inner)(w, xs.reshape(2, 2, *xs.shape[1:]))


def counted(body):
    def fn(w, xs):
        start = jnp.zeros((), xs.dtype)
        return lax.fori_loop(0, BATCH, lambda i, total: total + body(w, xs[i]), start)

    return fn


def chosen(body):
    def branch(w, x):
        nothing = jnp.zeros((), x.dtype)
        return lax.cond(x[0, 0] > -9, body, lambda w, x: nothing, w, x)

    return branch


def sharded(body):
    return jax.shard_map(
        lambda w, xs: lax.psum(sum(body(w, x) for x in xs), "shards"),
        mesh=mesh(shards=2),
        in_specs=(P(), P("shards")),
        out_specs=P(),
    )


saving_all = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable
)

LOOPS = {
    "scan": scanned,
    "scans in a scan": nested,
    "map": lambda body: lambda w, xs: lax.map(lambda x: body(w, x), xs).sum(),
    "fori_loop": counted,
    "cond": lambda body: lambda w, xs: chosen(body)(w, xs[0]),
    "conds in a scan": lambda body: scanned(chosen(body)),
    "jit in a scan": lambda body: scanned(jax.jit(body)),
    "scan in jit": lambda body: jax.jit(scanned(body)),
    "scan of a checkpoint": lambda body: scanned(jax.checkpoint(body)),
    "checkpoint that saves all": lambda body: lambda w, xs: saving_all(body)(w, xs[0]),
    "scan of one that saves all": lambda body: scanned(saving_all(body)),
    "shard_map": sharded,
}


def arguments(dtype):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((16, 16)) / 4
    xs = rng.standard_normal((BATCH, 6, 16))
    return [jnp.asarray(np.asarray(a, np.float32), dtype) for a in (w, xs)]


def loss_of(function, loop):
    weights = np.random.default_rng(1).standard_normal(16) + COMMON

    def body(w, x):
        return jnp.sum(function(x @ w) * jnp.asarray(weights, x.dtype))

    return loop(body)


def distance(found, expected):
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# Each function in one loop and one function in each; the other pairs go the same ways.
PAIRS = [
    pytest.param(
        name,
        loop,
        marks=[] if name == "softmax" or loop == "scan" else [pytest.mark.slow],
    )
    for name in FUNCTIONS
    for loop in LOOPS
]


@pytest.mark.numbers
@pytest.mark.parametrize("name, loop", PAIRS)
def test_a_gradient_taken_inside_is_as_good_as_without_the_loop(name, loop):
    fn = jax.grad(loss_of(FUNCTIONS[name], LOOPS[loop]), (0, 1))
    with jax.enable_x64(True):
        expected = jax.jit(fn)(*arguments(np.float64))
    found = jax.jit(jamp.autocast(fn, device_type="cpu"))(*arguments(np.float32))
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, np.asarray(theirs)) < TOLERANCE


def normalized_in_one_pass(w, x):
    """BatchNorm of some rows, with the variance as a difference of means."""
    h = x @ w
    mean = h.mean(0)
    variance = (h**2).mean(0) - mean**2
    y = (h - mean) * lax.rsqrt(variance + 1e-5)
    return jnp.mean(jax.nn.relu(y) ** 2)


@pytest.mark.numbers
@pytest.mark.parametrize("loop", ["scan", "map", "shard_map", "cond"])
@each_device
def test_few_numbers_are_kept_as_they_are_where_they_cancel(loop, device):
    rng = np.random.default_rng(0)
    w, xs = rng.standard_normal((16, 8)) / 4, rng.standard_normal((BATCH, 48, 16)) + 3
    fn = jax.grad(LOOPS[loop](normalized_in_one_pass))
    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(fn)(w, xs))
    cast = functools.partial(jamp.autocast, device_type=device)
    arrays = [np.asarray(a, np.float32) for a in (w, xs)]
    inside = distance(jax.jit(cast(fn))(*arrays), expected)
    outside = jax.jit(jax.grad(cast(LOOPS[loop](normalized_in_one_pass))))(*arrays)
    assert inside < 1.5 * distance(outside, expected)


@each_device
def test_gradients_of_gradients_go_through_branches_that_pad(device):
    def layer(w, h):
        y = jnp.concatenate([jnp.ones_like(h[:, :1]), h[:, 1:]], 1) @ w
        return y * y

    def fn(w, x):
        for _ in range(2):
            x = lax.cond(w.sum() > 0, layer, lambda w, h: h @ w, w, x)
        return jnp.mean(x**2)

    penalty = jax.grad(lambda w, x: jnp.sum(jax.grad(fn, 1)(w, x) ** 2), 1)
    w, x = jnp.eye(4) * 0.5, jnp.full((4, 4), 4.0)  # powers of two, never rounded
    found = jamp.autocast(penalty, device_type=device)(w, x)
    np.testing.assert_array_equal(found, penalty(w, x))


def carrying(function, loop):
    """A loss of what a loop carries, scaled as for float16."""

    def fn(w, xs):
        last = loop(lambda h, x: function(h @ w + x), jnp.zeros_like(xs[0]), xs)
        return 2.0**16 * jnp.sum(last * (jnp.arange(16) + COMMON))

    return fn


CARRIES = {
    "scan": lambda step, h, xs: lax.scan(lambda h, x: (step(h, x), None), h, xs)[0],
    "fori_loop": lambda step, h, xs: lax.fori_loop(
        0, BATCH, lambda i, h: step(h, xs[i]), h
    ),
    "scan of a checkpoint": lambda step, h, xs: lax.scan(
        jax.checkpoint(lambda h, x: (step(h, x), None)), h, xs
    )[0],
}


@pytest.mark.parametrize("loop", CARRIES.values(), ids=CARRIES)
@each_device
def test_a_loop_takes_the_first_cotangent_unrounded(loop, device):
    fn = jax.grad(carrying(jax.nn.softmax, loop), (0, 1))
    with jax.enable_x64(True):
        expected = jax.jit(fn)(*arguments(np.float64))
    found = jax.jit(jamp.autocast(fn, device_type=device))(*arguments(np.float32))
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, np.asarray(theirs)) < TOLERANCE


in_16_bits = pytest.mark.skipif(
    MOVES_BFLOAT16_AS_FLOAT32, reason="all stacks of loops are in float32 on CPUs there"
)


def stacks(fn):
    """The dtypes of what the first loop of a program leaves for the second."""
    program = jax.make_jaxpr(fn)(*arguments(np.float32))
    first, second = (eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    left = [var.aval.dtype for var in first.outvars if var in second.invars]
    assert left
    return set(left)


@in_16_bits
@pytest.mark.parametrize(
    "function, in_float32",
    [(jax.nn.softmax, True), (jax.nn.silu, False)],
    ids=["softmax", "silu"],
)
def test_only_what_a_gradient_adds_up_is_kept_in_float32(function, in_float32):
    gradient = jax.grad(loss_of(function, scanned))
    found = stacks(jamp.autocast(gradient, device_type="cpu"))
    assert (jnp.dtype(jnp.float32) in found) == in_float32


@in_16_bits
def test_what_a_loop_leaves_outside_of_gradients_stays_in_16_bits():
    def fn(w, xs):
        rows = lax.map(lambda x: jax.nn.softmax(x @ w), xs)
        return lax.map(lambda row: row.sum(-1), rows)

    assert stacks(jamp.autocast(fn, device_type="cpu")) == {jnp.dtype(jnp.bfloat16)}
