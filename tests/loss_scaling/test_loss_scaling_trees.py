"""Loss scaling of random trees, and the state through all that copies and stores it."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from scaler_reference import (
    NON_FINITE,
    TINY,
    is_inexact,
    numpy_unscaled,
    same,
    state_of,
)

import jamp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64, jnp.int32)
SHAPES = ((), (3,), (2, 2), (0,), (3, 0))
FINITE = (0.0, 1.0, -2.5, 1024.0, -5e4)
# The last two are so small that finite gradients overflow when they are unscaled.
SCALES = (1.0, 3.0, 65536.0, 1e30, 2.0**126, 1e-30, 1.3 * TINY, TINY)


@st.composite
def leaves(draw):
    """An array, seldom with a value that is not finite; or None."""
    if draw(st.integers(0, 5)) == 0:
        return None
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape))
    values = draw(st.lists(st.sampled_from(FINITE), min_size=size, max_size=size))
    if size and dtype != jnp.int32 and draw(st.integers(0, 7)) == 0:
        values[draw(st.integers(0, size - 1))] = draw(st.sampled_from(NON_FINITE))
    return jax.device_put(np.reshape(np.array(values), shape).astype(dtype))


trees = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)
scales = st.sampled_from(SCALES)
unscale = jamp.GradScaler().unscale


def expected_of(tree, scale):
    """The tree unscaled by numpy, and whether that is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        unscaled = jax.tree.map(lambda leaf: numpy_unscaled(leaf, scale), tree)
    floats = [leaf for leaf in jax.tree.leaves(unscaled) if is_inexact(leaf)]
    return unscaled, all(np.isfinite(leaf).all() for leaf in floats)


@given(trees, scales)
def test_unscaling_finds_what_numpy_finds(tree, scale):
    unscaled, found = unscale(state_of(scale), tree)
    expected, finite = expected_of(tree, scale)
    assert bool(found) == (not finite)
    if finite:
        assert same(unscaled, expected)
    assert jax.tree.structure(unscaled) == jax.tree.structure(tree)


@settings(max_examples=25)
@given(trees, scales)
def test_a_step_is_the_optimizers_or_none(tree, scale):
    grads = jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)
    inner = optax.trace(0.5)
    tx = jamp.dynamic_loss_scaling(inner, jamp.GradScaler(init_scale=scale))
    opt_state = tx.init(grads)
    updates, after = tx.update(grads, opt_state)
    expected, finite = expected_of(grads, scale)
    assert jamp.last_step_skipped(after) == (not finite)
    if finite:
        plain = inner.update(expected, inner.init(grads))
        assert same((updates, after.inner_state), plain)
    else:
        assert same(updates, jax.tree.map(jnp.zeros_like, grads))
        assert same(after.inner_state, opt_state.inner_state)
        assert jamp.loss_scale(after) == max(scale / 2, TINY)


TX = jamp.dynamic_loss_scaling(
    optax.MultiSteps(optax.adam(optax.linear_schedule(0.1, 0.0, 50)), 2),
    jamp.GradScaler(init_scale=48.0, growth_interval=3, hysteresis=3),
)
update = jax.jit(TX.update)


PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}


def sent_state():
    """A state with another number in every array, so that none can be mistaken."""
    leaves, structure = jax.tree.flatten(TX.init(PARAMS))
    return structure.unflatten(
        jnp.full_like(leaf, number + 2) for number, leaf in enumerate(leaves)
    )


def through_a_scan(opt_state):
    """The state after three rounds as the carry of a scan."""
    return jax.jit(
        lambda state: jax.lax.scan(lambda s, _: (s, None), state, length=3)[0]
    )(opt_state)


def through_vmap(opt_state):
    """The state as one of two members of an ensemble."""
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), opt_state)
    return jax.tree.map(lambda leaf: leaf[1], jax.jit(jax.vmap(lambda s: s))(both))


def through_flax_dict(opt_state):
    """The state through flax's dicts of strings."""
    values = serialization.to_state_dict(opt_state)
    return serialization.from_state_dict(TX.init(PARAMS), values)


def through_flax_bytes(opt_state):
    """The state through msgpack."""
    data = serialization.to_bytes(opt_state)
    return serialization.from_bytes(TX.init(PARAMS), data)


TRIPS = {
    "flatten": lambda s: jax.tree.unflatten(
        jax.tree.structure(s), [np.asarray(leaf) for leaf in jax.tree.leaves(s)]
    ),
    "jit": lambda s: jax.jit(lambda s: s)(s),
    "scan": through_a_scan,
    "vmap": through_vmap,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "flax dict": through_flax_dict,
    "flax bytes": through_flax_bytes,
}


def fields(state, path=""):
    """Every field of nested named tuples, by its path."""
    if not hasattr(state, "_fields"):
        return {path: state}
    named = {name: getattr(state, name) for name in state._fields}
    parts = [fields(value, f"{path}.{name}") for name, value in named.items()]
    return functools.reduce(lambda a, b: a | b, parts, {})


def assert_arrived(arrived, sent):
    """Every field is what it was, and the next step is the one it would have been."""
    assert list(fields(arrived)) == list(fields(sent))
    for path, value in fields(sent).items():
        assert same(fields(arrived)[path], value), path
    assert same(update(PARAMS, arrived, PARAMS), update(PARAMS, sent, PARAMS))


@pytest.mark.parametrize("name", TRIPS)
def test_the_state_arrives_field_by_field(name):
    assert_arrived(TRIPS[name](sent_state()), sent_state())


def test_the_state_arrives_through_orbax(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    opt_state = sent_state()
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", opt_state)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(TX.init, PARAMS)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert_arrived(restored, opt_state)


def test_a_scalers_own_state_goes_through_a_scan_and_a_pickle():
    scaler = jamp.GradScaler(init_scale=8.0, growth_interval=2, hysteresis=2)
    body = lambda state, event: (scaler.update(state, event), None)  # noqa: E731
    state, _ = jax.lax.scan(body, scaler.init(), jnp.array([True, True, True, False]))
    assert same(state, state_of(2.0, 1, 0))
    assert same(pickle.loads(pickle.dumps((scaler, state)))[1], state)
