"""What loops stack: 16 bits, unless XLA goes through all of it for each element."""

import functools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import equations

import jamp

LENGTH, SIZE = 7, 4
# Before, XLA for CPUs converts all of a stack of bfloat16 to put one more on it.
STACKS_16_BITS = jaxlib.version.__version_info__ >= (0, 11, 2)

autocast = functools.partial(jamp.autocast, device_type="cpu", dtype=jnp.bfloat16)


def arrays():
    rng = np.random.default_rng(0)
    weights, xs = (
        rng.standard_normal((SIZE, SIZE)),
        rng.standard_normal((LENGTH, 3, SIZE)),
    )
    return jnp.float32(weights / 2), jnp.float32(xs)


TRUST_RATIO = optax.scale_by_trust_ratio()


@jax.jit
def jitted_cell(weights, state, x):
    return jnp.tanh(x + state @ weights)


@jax.checkpoint
def squared(weights, h):
    return (h * h) @ weights


# Of a step: the next state, and what the loop gives for it.
STEPS = {
    "a recurrence": lambda w, state, x: (jnp.tanh(x + state @ w), None),
    "products": lambda w, state, x: (state, x @ w),
    "products of products": lambda w, state, x: (state, (x @ w) @ w),
    "elementwise in 16 bits": lambda w, state, x: (state, (x @ w) * (x @ w.T)),
    "a function in float32": lambda w, state, x: (jax.nn.softmax(state @ w) + x, None),
    "gates": lambda w, state, x: (
        jax.nn.sigmoid(x @ w) * state + jnp.tanh(state @ w) * (x @ w.T),
        state @ w,
    ),
    "einsum": lambda w, state, x: (jnp.einsum("ij,jk->ik", state, w) + x, None),
    "a convolution": lambda w, state, x: (
        state + lax.conv(x[:, None], w[:1, None], (1,), "SAME")[:, 0],
        None,
    ),
    "jitted functions that share a cast": lambda w, state, x: (
        state - TRUST_RATIO.update(x @ w, optax.EmptyState(), state)[0],
        None,
    ),
    "a jitted function": lambda w, state, x: (jitted_cell(w, state, x), None),
    "a branch": lambda w, state, x: (
        lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ w) @ w, lambda h: h, state),
        None,
    ),
    "a checkpoint": lambda w, state, x: (state, squared(w, x @ w)),
    "a loop in it": lambda w, state, x: (
        lax.scan(lambda h, _: (jnp.tanh(h @ w) + x, h @ w), state, None, 2)[0],
        None,
    ),
}


def loop(step, weights, xs):
    """The last state and what the loop gives."""
    return lax.scan(functools.partial(step, weights), jnp.ones(xs.shape[1:]), xs)


def loss(step, weights, xs):
    found = jax.tree.leaves(loop(step, weights, xs))
    return sum(jnp.sum(jnp.float32(array) ** 2) for array in found)


def stacked(program):
    """The dtypes of what the loops of a program stack."""
    made = (
        v.aval
        for e in equations(program)
        if e.primitive.name == "scan"
        for v in e.outvars
    )
    return {str(aval.dtype) for aval in made if aval.shape[:1] == (LENGTH,)}


@pytest.mark.parametrize("step", STEPS)
def test_stacks_of_a_training_step_have_the_dtype_that_xla_writes_fast(step):
    fn = autocast(functools.partial(loss, STEPS[step]))
    found = stacked(jax.make_jaxpr(jax.grad(fn))(*arrays()))
    assert ("bfloat16" in found) is STACKS_16_BITS


@pytest.mark.parametrize("step", STEPS)
def test_what_a_loop_gives_has_the_dtypes_of_its_steps(step):
    weights, xs = arrays()
    made = jax.eval_shape(autocast(STEPS[step]), weights, xs[0], xs[0])[1]
    given = jax.eval_shape(autocast(functools.partial(loop, STEPS[step])), weights, xs)
    dtypes = [
        [leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (given[1], made)
    ]
    assert dtypes[0] == dtypes[1]


@pytest.mark.numbers
@pytest.mark.parametrize("step", STEPS)
def test_the_gradient_of_a_loop_is_that_of_float32(step):
    fn = functools.partial(loss, STEPS[step])
    expected = jax.grad(fn)(*arrays())
    found = jax.jit(jax.grad(autocast(fn)))(*arrays())
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
