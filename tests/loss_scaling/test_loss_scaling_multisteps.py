"""optax.MultiSteps around and inside dynamic_loss_scaling."""

import jax
import jax.numpy as jnp
import optax
import pytest
from scaler_reference import NON_FINITE, all_finite

import jamp

SCALER = jamp.GradScaler(init_scale=2.0**10, growth_interval=2)


def scaling(inner):
    """The optimizer under test, as a part of others."""
    return jamp.dynamic_loss_scaling(inner, SCALER)


def accumulate(tx, gradients):
    """What each micro-batch adds to a parameter, and the states after it."""
    update, params = jax.jit(tx.update), jnp.zeros(1)
    opt_state, added, states = tx.init(params), [], []
    for gradient in gradients:
        grads = jamp.scale_loss(jnp.array([gradient]), opt_state)
        updates, opt_state = update(grads, opt_state, params)
        added.append(float(updates[0]))
        states.append(opt_state)
    return added, states


@pytest.mark.parametrize("bad", [4, 5, 7])
@pytest.mark.parametrize("value", NON_FINITE)
def test_one_overflow_in_multisteps_inside_it_skips_the_whole_batch(bad, value):
    gradients = [1.0, 3.0, 5.0, 7.0] * 3
    gradients[bad] = value
    tx = scaling(optax.MultiSteps(optax.sgd(1.0, momentum=0.5), 4))
    added, states = accumulate(tx, gradients)
    assert added == [0.0] * 3 + [-4.0] + [0.0] * 7 + [-6.0]
    assert all_finite(states)
    # Scale, skipped and the counters stand still during a batch.
    for state, (scale, skipped, count, total) in zip(
        states,
        [(2.0**10, False, 0, 0)] * 3
        + [(2.0**10, False, 0, 1)] * 4
        + [(2.0**9, True, 1, 2)] * 4
        + [(2.0**9, False, 1, 3)],
        strict=True,
    ):
        assert jamp.loss_scale(state) == scale
        assert jamp.last_step_skipped(state) == skipped
        assert (int(state.skipped_steps), int(state.total_steps)) == (count, total)


def test_batches_of_multisteps_grow_with_its_own_steps():
    tx = scaling(optax.MultiSteps(optax.sgd(1.0), lambda step: 1 + step))
    added, _ = accumulate(tx, [1.0, jnp.inf, 1.0, 3.0, 5.0, 1.0, 2.0, 3.0])
    assert added == [-1.0, 0.0, 0.0, 0.0, -4.0, 0.0, 0.0, -2.0]


def test_a_disabled_scaler_goes_on_in_the_middle_of_a_batch_that_overflowed():
    multi_steps = optax.MultiSteps(optax.sgd(1.0), 2)
    state = scaling(multi_steps).init(jnp.ones(1))
    _, state = scaling(multi_steps).update(jnp.array([jnp.inf]), state)
    grads = jamp.scale_loss(jnp.array([2.0]), state)
    disabled = jamp.dynamic_loss_scaling(multi_steps, jamp.GradScaler(enabled=False))
    updates, state = disabled.update(grads, state)
    assert updates == -1.0
    assert not jamp.last_step_skipped(state)


def test_multisteps_in_a_chain_inside_it_leaves_one_micro_batch_out():
    multi_steps = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = scaling(optax.chain(optax.identity(), multi_steps))
    added, _ = accumulate(tx, [1.0, jnp.nan, 3.0, 5.0, jnp.inf, 7.0])
    assert added == [0.0, 0.0, -2.0, 0.0, 0.0, -6.0]


@pytest.mark.filterwarnings("ignore:optax.MultiSteps around")
def test_multisteps_around_it_skips_the_batch_of_an_overflow():
    tx = optax.MultiSteps(scaling(optax.sgd(1.0)), 2)
    added, states = accumulate(tx, [1.0, 3.0, jnp.inf, 1.0])
    assert added == [0.0, -2.0, 0.0, 0.0]
    assert jamp.last_step_skipped(states[-1])
    assert jamp.loss_scale(states[-1]) == 2.0**9


@pytest.mark.filterwarnings("ignore:optax.MultiSteps around")
@pytest.mark.xfail(reason="optax.MultiSteps clears its sum by a product with 0: a NaN")
def test_multisteps_around_it_takes_the_batch_after_a_skipped_one():
    tx = optax.MultiSteps(scaling(optax.sgd(1.0)), 2)
    added, _ = accumulate(tx, [1.0, jnp.inf, 1.0, 3.0])
    assert added[-1] == -2.0
