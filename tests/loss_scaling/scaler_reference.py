"""What tests of loss scaling compare with: recorded runs of torch, and equal trees."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp

TINY = np.finfo(np.float32).tiny
NON_FINITE = (np.inf, -np.inf, np.nan)


class Trace(NamedTuple):
    """A run of torch's GradScaler: which steps overflowed, and what it did then."""

    name: str
    config: dict
    events: np.ndarray
    scale: np.ndarray
    tracker: np.ndarray

    @property
    def scaler(self):
        """The scaler that behaves like torch's."""
        return jamp.GradScaler(**self.config, min_scale=None)

    @property
    def before(self):
        """torch's states before each step."""
        first = self.scaler.init()
        return first._replace(
            scale=np.concatenate([[first.scale], self.scale[:-1]]),
            growth_tracker=np.concatenate([[first.growth_tracker], self.tracker[:-1]]),
            hysteresis_tracker=np.zeros_like(self.tracker),
        )

    @property
    def normal(self):
        """Which steps neither start nor end at a denormal scale."""
        scales = np.abs(np.stack([self.before.scale, self.scale]))
        return ((scales == 0) | (scales >= TINY)).all(axis=0)

    @property
    def distinct(self):
        """The normal steps without those that only the tracker tells apart."""
        before, interval = self.before, self.config["growth_interval"]
        due = before.growth_tracker + 1 == interval
        _, first = np.unique(
            [before.scale.astype(np.float64), self.events, due],
            axis=1,
            return_index=True,
        )
        chosen = np.zeros_like(self.events)
        chosen[first] = True
        return chosen & self.normal


class Trajectory(NamedTuple):
    """A run of a torch optimizer on `0.5 p A p - b p` with a GradScaler."""

    trace: Trace
    micro_batches: int
    matrix: np.ndarray
    vector: np.ndarray
    start: np.ndarray
    params: np.ndarray

    def loss(self, params):
        """The loss at some parameters."""
        return 0.5 * params @ self.matrix @ params - self.vector @ params


def _recorded(name):
    path = Path(__file__).parents[1] / "data" / name
    return json.loads(path.read_text(encoding="utf-8"))


def _trace(record):
    return Trace(
        record["name"],
        record["config"],
        np.array([event == "1" for event in record["events"]]),
        np.array(record["scale_after"], np.float32),
        np.array(record["growth_tracker_after"], np.int32),
    )


def traces():
    """All recorded runs of the scaler alone."""
    return [_trace(record) for record in _recorded("scaler_traces.json")]


def trajectories():
    """All recorded runs with an optimizer."""
    return [
        Trajectory(
            _trace(record),
            record["accum"],
            *(
                np.array(record[key], np.float32)
                for key in ("A", "b", "w0", "params_after")
            ),
        )
        for record in _recorded("scaler_trajectories.json")
    ]


def state_of(scale, tracker=0, hysteresis=0):
    """A scaler's state, whatever made it."""
    counters = jnp.int32(tracker), jnp.int32(hysteresis)
    return jamp.ScalerState(jnp.float32(scale), *counters)


def torch_adam(learning_rate, b1=0.9, b2=0.999, eps=1e-8):
    """torch's Adam. optax's loses digits of `1 - b2**count` in float32."""

    def init(params):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, (params, params))

    def update(grads, state, params=None):
        del params
        count, (mean, square) = state
        count = count + 1
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, square, grads)
        first, second = (-jnp.expm1(count * np.log(decay)) for decay in (b1, b2))
        updates = jax.tree.map(
            lambda m, v: (
                -learning_rate / first * m / (jnp.sqrt(v) / jnp.sqrt(second) + eps)
            ),
            mean,
            square,
        )
        return updates, (count, (mean, square))

    return optax.GradientTransformation(init, update)


def numpy_unscaled(leaf, scale):
    """torch's product with the float32 inverse, rounded once to the leaf's dtype."""
    leaf = np.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, np.inexact):
        return leaf
    inverse = np.float32(1 / np.float64(np.float32(scale)))
    wide = np.complex64 if leaf.dtype.kind == "c" else np.float32
    return (leaf.astype(wide) * inverse).astype(leaf.dtype)


def bits(leaf):
    """A leaf's dtype, shape and bytes."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


def same(a, b):
    """Whether two trees are equal bit for bit."""
    same_structure = jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return same_structure and all(bits(x) == bits(y) for x, y in pairs)


def all_finite(tree):
    """Whether no leaf of a tree holds an inf or a NaN."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return all(np.isfinite(np.asarray(leaf, np.complex128)).all() for leaf in leaves)


def is_inexact(leaf):
    """Whether a leaf can hold an inf or a NaN."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def places(tree):
    """Every element of the floating leaves, as (leaf number, flat index)."""
    return [
        (number, index)
        for number, leaf in enumerate(jax.tree.leaves(tree))
        if is_inexact(leaf)
        for index in range(leaf.size)
    ]


def poisoned(tree, place, value):
    """A copy of a tree with another value in one place."""
    leaves, structure = jax.tree.flatten(tree)
    number, index = place
    leaf = leaves[number]
    leaves[number] = leaf.reshape(-1).at[index].set(value).reshape(leaf.shape)
    return structure.unflatten(leaves)


def in_a_scan(update, state, events):
    """The states of a run, in one program."""

    def body(state, event):
        state = update(state, event)
        return state, state

    return jax.jit(lambda state, events: jax.lax.scan(body, state, events)[1])(
        state, events
    )


def assert_steps(actual, trace, steps):
    """Scale and tracker are torch's at some steps, bit for bit."""
    assert steps.any()
    for found, expected in (
        (actual.scale, trace.scale),
        (actual.growth_tracker, trace.tracker),
    ):
        assert bits(np.asarray(found)[steps]) == bits(expected[steps])
