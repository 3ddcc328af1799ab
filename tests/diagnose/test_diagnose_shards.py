"""`jamp.diagnose` on operations that hold programs: `shard_map` and kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diagnosed import diagnose
from jax import P, lax
from jax.experimental import pallas as pl

import jamp

MESH = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
W = 0.2 * jax.random.normal(jax.random.key(0), (32, 32))
X = jax.random.normal(jax.random.key(1), (16, 32))


def sharded(body):
    """The mean of what a function of weights and rows gives on two devices."""
    each = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P("i"))
    return lambda w, x: jnp.mean(jnp.square(each(w, x)))


@jax.custom_vjp
def activated(w, x):
    return jax.nn.relu(x @ w)


def activated_bwd(saved, g):
    w, x = saved
    return lax.psum(x.T @ g, "i"), g @ w.T


activated.defvjp(lambda w, x: (activated(w, x), (w, x)), activated_bwd)


def loop(w, x):
    c, sums = lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)
    return c * sums[-1]


def branch(w, x):
    return lax.cond(lax.psum(x.sum(), "i") < 99, lambda x: x @ w, lambda x: x, x)


def dropout(w, x):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.where(kept, x @ w, 0)


def scattered(w, x):
    y = x @ w
    return y.at[jnp.array([0, 0, 1])].add(0.1 * y[:3])


def constants(w, x):
    return (x @ w) * (jnp.arange(32, dtype=jnp.bfloat16) / 32) + lax.psum(x, "i")


LOW = jnp.arange(32, dtype=jnp.float16) / 32


def low_constant(w, x):
    """A constant in 16 bits, which a jitted function closes over."""
    return jax.jit(lambda y: y * LOW)(x @ w)


def observed(body):
    """The same, seen by a callback, which runs once."""

    def told(w, x):
        jax.debug.callback(lambda _: None, x[0, 0])
        return body(w, x)

    return told


BODIES = (
    low_constant,
    loop,
    branch,
    dropout,
    scattered,
    constants,
    activated,
    jax.checkpoint(loop),
)


@pytest.mark.parametrize("body", BODIES)
def test_what_each_device_computes_is_compared_with_float32(body):
    fn, scale = sharded(body), 2.0**10
    found = diagnose(fn, dtype="float16", loss_scale=scale)(W, X)
    assert found.healthy
    assert not found.unseen
    low = jamp.autocast(fn, device_type="gpu", dtype="float16")
    want, grad = jax.jit(jax.value_and_grad(fn))(W, X)
    got, low_grad = jax.jit(jax.value_and_grad(lambda *a: scale * low(*a)))(W, X)
    np.testing.assert_allclose(
        found.errors["loss"], abs(got / scale - want) / want, atol=2e-4
    )
    wrong = jnp.linalg.norm(low_grad / scale - grad) / jnp.linalg.norm(grad)
    np.testing.assert_allclose(found.gradient_error, wrong, atol=2e-4)


def applied(x):
    return (x @ W).at[jnp.arange(4)].apply(lambda y: jnp.sin(50 * y))


def test_what_a_scatter_applies_is_compared_with_float32():
    want, got = applied(X), jamp.autocast(applied, device_type="gpu")(X)
    wrong = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    found = diagnose(applied)(X).errors["result"]
    np.testing.assert_allclose(found, wrong, rtol=0.05)


def planted(factor):
    return sharded(lambda w, x: ((x @ w) * factor) @ w)


@pytest.mark.parametrize(("factor", "kind"), [(5e5, "overflow"), (1e-12, "underflow")])
def test_a_fault_on_each_device_is_found_and_cured(factor, kind):
    fn = planted(factor)
    found = diagnose(fn, dtype="float16")(W, X)
    ((named, operation), *more) = [(f.kind, f.operation) for f in found.findings]
    assert (named, operation, more) == (kind, "shard_map", [])
    assert found.findings[0].location.line == sharded.__code__.co_firstlineno + 3
    (suggestion,) = found.suggestions
    assert suggestion.cured
    assert diagnose(fn, dtype="float16", **suggestion.options)(W, X).healthy


def test_what_may_run_only_once_is_not_called_healthy():
    found = diagnose(sharded(observed(loop)), dtype="float16")(W, X)
    assert found.unseen == ("shard_map",)
    assert "as far as was looked" in str(found)


@pytest.mark.parametrize("factor", [5e4, 1e-12])
def test_what_is_not_looked_into_is_not_called_healthy(factor):
    def kernel(x, y):
        y[...] = x[...].astype(jnp.float16) * factor * 10 * factor

    def fn(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float16)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x).mean()

    found = diagnose(fn)(X)
    assert found.unseen == ("pallas_call",)
    told = "which is not into pallas_call", "pallas_call is not finite; it is not looke"
    assert told[not found.healthy] in str(found)
