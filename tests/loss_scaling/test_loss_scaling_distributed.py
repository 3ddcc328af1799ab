"""An overflow on one device skips the step on all, and leaves equal states."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

SCALER = jamp.GradScaler(init_scale=2.0**10, growth_interval=3)
SGD = optax.sgd(0.1)
W = jnp.array([1.0, 2.0])
DEVICES = 8
STEPS = 6


def mesh():
    return jax.make_mesh((DEVICES,), ("d",), (jax.sharding.AxisType.Auto,))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def start():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w": jax.random.normal(keys[0], (8, 16)),
        "v": jax.random.normal(keys[1], (16, 1)),
    }


def batches(overflows):
    """A batch per step; in some steps one device's rows hold an inf."""
    for step in range(STEPS):
        x = jax.random.normal(jax.random.key(step), (16, 8))
        yield x.at[5, 0].set(jnp.inf) if step in overflows else x


def run(step, params, opt_state, overflows):
    for x in batches(overflows):
        params, opt_state = step(params, opt_state, x)
    return params, opt_state


def on_one_device(overflows):
    tx = jamp.dynamic_loss_scaling(optax.adam(1e-2), SCALER)

    @jax.jit
    def step(params, opt_state, x):
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = start()
    return run(step, params, tx.init(params), overflows)


def data_parallel(overflows):
    """Global arrays under jit: the batch is sharded, the parameters are everywhere."""
    tx = jamp.dynamic_loss_scaling(optax.adam(1e-2), SCALER)
    rows, everywhere = NamedSharding(mesh(), P("d")), NamedSharding(mesh(), P())

    @jax.jit
    def step(params, opt_state, x):
        x = jax.lax.with_sharding_constraint(x, rows)
        _, grads = jamp.value_and_grad(loss_fn)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(start(), everywhere)
    return run(step, params, tx.init(params), overflows)


def fully_sharded(overflows):
    """shard_map: each device has rows of the parameters, and of the batch."""
    tx = jamp.dynamic_loss_scaling(optax.adam(1e-2), SCALER, axis_name="d")

    def local_step(params, opt_state, x):
        def loss(shards):
            gather = lambda a: jax.lax.all_gather(a, "d", tiled=True)  # noqa: E731
            return loss_fn(jax.tree.map(gather, shards), x) / DEVICES

        _, grads = jamp.value_and_grad(loss)(opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = start()
    opt_state = tx.init(params)
    spec = lambda leaf: P("d") if leaf.ndim else P()  # noqa: E731
    specs = jax.tree.map(spec, (params, opt_state))
    step = jax.jit(
        jax.shard_map(
            local_step, mesh=mesh(), in_specs=(*specs, P("d")), out_specs=specs
        )
    )
    return run(step, params, opt_state, overflows)


@pytest.mark.parametrize("overflows", [(), (2,), (0, 1, 4)])
@pytest.mark.parametrize("train", [data_parallel, fully_sharded])
def test_sharded_training_is_that_of_one_device(train, overflows):
    params, opt_state = train(overflows)
    expected, expected_state = on_one_device(overflows)
    assert int(opt_state.skipped_steps) == len(overflows)
    assert float(jamp.loss_scale(opt_state)) == float(jamp.loss_scale(expected_state))
    for actual, right in zip(
        jax.tree.leaves((params, opt_state)),
        jax.tree.leaves((expected, expected_state)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, right, rtol=2e-4, atol=2e-6)


def gradient_of_one_device(axis_name):
    """Updates of 8 devices with a gradient each, of which the fifth overflows."""
    tx = jamp.dynamic_loss_scaling(optax.sgd(1.0), SCALER, axis_name=axis_name)

    def local(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, state.last_step_skipped[None], jamp.loss_scale(state)[None]

    shard = jax.shard_map(
        local, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=False
    )
    return shard(jnp.ones(DEVICES).at[4].set(jnp.nan))


def test_with_an_axis_name_all_devices_skip_together():
    updates, skipped, scales = gradient_of_one_device("d")
    assert skipped.all()
    assert (updates == 0).all()
    assert (scales == 2.0**9).all()


def test_without_an_axis_name_each_device_would_decide_for_itself():
    _, skipped, scales = gradient_of_one_device(None)
    assert skipped.tolist() == [number == 4 for number in range(DEVICES)]
    assert len(set(scales.tolist())) == 2


def test_states_of_all_devices_are_equal_after_an_overflow_on_one():
    _, opt_state = data_parallel((2,))
    for leaf in jax.tree.leaves(opt_state):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for shard in shards[1:]:
            np.testing.assert_array_equal(shard, shards[0])


def test_an_axis_that_is_not_mapped_is_named():
    tx = jamp.dynamic_loss_scaling(SGD, axis_name="batch")
    message = "axis_name='batch' names no axis that is mapped here"
    with pytest.raises(jamp.ScalerError, match=message):
        tx.update(W, tx.init(W), W)
    with pytest.raises(jamp.ScalerError, match=message):
        jamp.metrics(tx.init(W), W, axis_name="batch")


@pytest.mark.parametrize(
    "axis", [5, True, {"d"}, ["d", ["e"]], ("d", 0), ("d", "d"), np.ones(2)], ids=repr
)
def test_what_names_no_axis_that_jax_reduces_over_is_refused_at_once(axis):
    message = f"axis_name must be .*; got {re.escape(repr(axis))}"
    with pytest.raises(jamp.ScalerTypeError, match=message):
        jamp.dynamic_loss_scaling(SGD, axis_name=axis)
    with pytest.raises(jamp.ScalerTypeError, match=message):
        jamp.metrics(SCALER.init(), W, axis_name=axis)


@pytest.mark.parametrize("axis", ["d", b"d", 1.5, ("d", "e"), frozenset("d")], ids=repr)
def test_an_axis_may_have_any_name_that_jax_reduces_over(axis):
    def step(w):
        tx = jamp.dynamic_loss_scaling(SGD, SCALER, axis_name=[axis])
        _, state = tx.update(w, tx.init(w), w)
        norm = jamp.metrics(SCALER.init(), w, axis_name=(axis,))["grad_norm"]
        return state.last_step_skipped, norm

    skipped, norms = jax.vmap(step, axis_name=axis)(jnp.array([[3.0], [4.0]]) * 2.0**10)
    assert not skipped.any()
    np.testing.assert_array_equal(norms, [5.0, 5.0])
    skipped, _ = jax.vmap(step, axis_name=axis)(jnp.array([1.0, jnp.inf]))
    assert skipped.all()


def test_an_overflow_in_an_optimizers_own_gradients_skips_the_step_on_all_devices():
    inner = optax.GradientTransformationExtraArgs(
        SGD.init, lambda grads, state, params, grad_fn: (grad_fn(params), state)
    )
    tx = jamp.dynamic_loss_scaling(inner, SCALER, axis_name="d")

    def local(grads, own):
        _, state = tx.update(grads, tx.init(grads), grads, grad_fn=lambda _: own)
        return state.last_step_skipped, jamp.loss_scale(state)

    ones = jnp.ones(4)
    skipped, scales = jax.vmap(local, axis_name="d")(ones, ones.at[1].set(jnp.nan))
    assert skipped.all()
    assert len(set(scales.tolist())) == 1
