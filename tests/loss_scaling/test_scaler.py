"""GradScaler follows torch's transitions bit for bit, and what it adds holds too."""

import dataclasses
import functools
import math
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scaler_reference import TINY, assert_steps, bits, in_a_scan, same, state_of, traces

from jamp import GradScaler, ScalerError, ScalerTypeError, metrics, value_and_grad

TRACES = traces()
each_trace = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)


def stacked(states):
    """A list of states as one with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def one_by_one(update, states, events):
    """Each state after its event, one call for each."""
    rows = map(state_of, *map(np.asarray, states))
    return stacked([update(*row) for row in zip(rows, events, strict=True)])


def in_a_loop(update, state, events):
    """The states of a run, one call a step."""
    states = []
    for event in events:
        state = update(state, event)
        states.append(state)
    return stacked(states)


jitted = jax.jit(GradScaler.update, static_argnums=0)
TRANSITIONS = {
    "eager": lambda scaler, *rows: one_by_one(scaler.update, *rows),
    "jit": lambda scaler, *rows: one_by_one(functools.partial(jitted, scaler), *rows),
    "vmap": lambda scaler, *rows: jax.jit(jax.vmap(scaler.update))(*rows),
}
RUNS = {
    "jit": lambda scaler, *run: in_a_loop(functools.partial(jitted, scaler), *run),
    "scan": lambda scaler, *run: in_a_scan(scaler.update, *run),
}


@pytest.mark.numbers
@each_trace
@pytest.mark.parametrize("how", TRANSITIONS)
def test_a_transition_is_torchs(trace, how):
    # Each eager step takes milliseconds.
    steps = trace.distinct if how == "eager" else trace.normal
    before = jax.tree.map(lambda leaf: jax.device_put(leaf[steps]), trace.before)
    after = TRANSITIONS[how](trace.scaler, before, trace.events[steps])
    kept = trace._replace(scale=trace.scale[steps], tracker=trace.tracker[steps])
    assert_steps(after, kept, np.ones(steps.sum(), bool))


@pytest.mark.numbers
@each_trace
@pytest.mark.parametrize("how", RUNS)
def test_a_run_is_torchs_until_the_scale_is_denormal(trace, how):
    states = RUNS[how](trace.scaler, trace.scaler.init(), trace.events)
    steps = np.logical_and.accumulate(trace.normal)
    if not trace.normal[0]:
        assert trace.name == "decay_to_zero_and_stay_zero"
        return
    assert_steps(states, trace, steps)


def test_runs_side_by_side_are_torchs():
    trace = next(trace for trace in TRACES if trace.name == "bursts_1")
    both = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), trace.scaler.init())
    events = np.stack([~trace.events, trace.events], axis=1)
    states = in_a_scan(jax.vmap(trace.scaler.update), both, events)
    assert_steps(jax.tree.map(lambda leaf: leaf[:, 1], states), trace, trace.normal)


def test_x64_changes_no_transition():
    trace = next(trace for trace in TRACES if trace.name == "init_pi")
    with jax.enable_x64(True):
        states = in_a_scan(trace.scaler.update, trace.scaler.init(), trace.events)
    assert_steps(states, trace, trace.normal)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"growth_interval": 1},
        {"growth_interval": 7, "growth_factor": 1.7, "backoff_factor": 0.3},
        {"growth_interval": 3, "growth_factor": 16.0, "backoff_factor": 0.9},
        {"growth_interval": 10, "backoff_factor": 2.0**-20, "min_scale": 2.0**-100},
    ],
)
def test_after_10000_overflows_the_scale_returns(config):
    scaler = GradScaler(**config)
    grows = math.log(scaler.init_scale / scaler.min_scale, scaler.growth_factor)
    finite = math.ceil(round(grows, 6)) * scaler.growth_interval

    @jax.jit
    def run(state, found, steps):
        return jax.lax.fori_loop(0, steps, lambda _, s: scaler.update(s, found), state)

    low = run(scaler.init(), True, 10_000)
    high = run(low, False, finite)
    assert low.scale == scaler.min_scale
    assert scaler.init_scale <= high.scale < scaler.init_scale * scaler.growth_factor


def test_without_a_floor_a_scale_of_zero_stays():
    scaler = GradScaler(min_scale=None, growth_interval=1)
    state = in_a_loop(scaler.update, state_of(TINY), [True] * 30 + [False] * 3)
    assert state.scale[-1] == 0


def test_growth_stops_at_the_maximum():
    scaler = GradScaler(init_scale=3.0, max_scale=10.0, growth_interval=1)
    states = in_a_scan(scaler.update, scaler.init(), np.zeros(4, bool))
    assert states.scale.tolist() == [6.0, 10.0, 10.0, 10.0]
    assert states.growth_tracker.tolist() == [0, 0, 0, 0]


def test_back_off_stops_at_the_minimum():
    scaler = GradScaler(init_scale=3.0, min_scale=1.0)
    states = in_a_scan(scaler.update, scaler.init(), np.ones(3, bool))
    assert states.scale.tolist() == [1.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("interval", "tracker", "scale", "after"),
    [
        (5, 3, 8.0, 4),
        (5, 4, 16.0, 0),
        # The interval was longer before. torch's scale would not grow any more.
        (5, 5, 16.0, 0),
        (5, 1200, 16.0, 0),
        (0, 9, 8.0, 10),
        (0, 2**31 - 1, 8.0, 2**31 - 1),
    ],
)
def test_the_scale_grows_when_the_tracker_has_reached_the_interval(
    interval, tracker, scale, after
):
    state = GradScaler(growth_interval=interval).update(state_of(8.0, tracker), False)
    assert (float(state.scale), int(state.growth_tracker)) == (scale, after)


@pytest.mark.parametrize(("found", "after"), [(False, 64.0), (True, 32.0)])
def test_a_scale_of_a_scaler_with_other_bounds_is_brought_into_them(found, after):
    scaler = GradScaler(init_scale=64.0, min_scale=4.0, max_scale=64.0)
    assert float(scaler.update(state_of(1024.0), found).scale) == after
    assert float(scaler.update(state_of(1.0), found).scale) == 4.0


def test_growth_to_inf_is_suppressed_and_the_tracker_starts_again():
    state = GradScaler(growth_interval=1).update(state_of(3e38), False)
    assert bits(state.scale) == bits(jnp.float32(3e38))
    assert state.growth_tracker == 0


@pytest.mark.parametrize(
    ("factor", "found", "before", "after"),
    [
        ({"growth_factor": 2.0**150}, False, 2.0**-100, 2.0**50),
        ({"backoff_factor": 2.0**-150}, True, 2.0**100, 2.0**-50),
    ],
)
def test_a_factor_may_be_one_that_float32_does_not_hold(factor, found, before, after):
    scaler = GradScaler(growth_interval=1, **factor)
    assert scaler.update(state_of(before), found).scale == after


def test_hysteresis_backs_off_after_overflows_in_a_row():
    scaler = GradScaler(init_scale=64.0, hysteresis=3, growth_interval=2)
    events = [True, True, False, True, True, True, True, False, False, True]
    states = in_a_scan(scaler.update, scaler.init(), np.array(events))
    scales = [64.0, 64.0, 64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0]
    assert states.scale.tolist() == scales
    assert states.hysteresis_tracker.tolist() == [1, 2, 0, 1, 2, 3, 3, 0, 0, 1]
    assert states.growth_tracker.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (True, True),
        (jnp.array(False), False),
        ([jnp.array(False), jnp.array(True)], True),
        ({"generator": jnp.array(False), "critic": jnp.array(False)}, False),
        (jnp.array([False, True, False]), True),
        (np.float32(1.0), True),
        (np.int32(2), True),
        (0.0, False),
    ],
)
def test_one_flag_of_several_is_enough(flags, found):
    scaler = GradScaler(init_scale=8.0)
    for update in (scaler.update, jax.jit(scaler.update)):
        assert float(update(scaler.init(), flags).scale) == (4.0 if found else 8.0)


@pytest.mark.parametrize("kind", [float, jnp.float32])
def test_a_new_scale_is_brought_into_the_bounds(kind):
    scaler = GradScaler(init_scale=8.0, min_scale=2.0, max_scale=32.0)
    for given, expected in ((1.0, 2.0), (2.0, 2.0), (5.0, 5.0), (64.0, 32.0)):
        assert scaler.update(scaler.init(), new_scale=kind(given)).scale == expected
    unbounded = GradScaler(min_scale=None)
    assert unbounded.update(unbounded.init(), new_scale=kind(1e-30)).scale == 1e-30


@pytest.mark.parametrize("new_scale", [3.0, 3, np.float32(3), jnp.array(3.0)])
def test_a_new_scale_leaves_the_counters(new_scale):
    scaler = GradScaler(growth_interval=10, hysteresis=4)
    state = scaler.update(state_of(8.0, 7, 2), True, new_scale)
    assert same(state, state_of(3.0, 7, 2))


@pytest.mark.parametrize(
    "arguments",
    [(), (None,), ([],), (False, jnp.ones(1)), (False, np.ones((2, 2)))],
)
def test_update_needs_a_flag_or_a_scalar(arguments):
    scaler = GradScaler()
    with pytest.raises(ScalerError, match=r"No inf checks|must be a scalar"):
        scaler.update(scaler.init(), *arguments)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"growth_factor": 1.0}, "growth factor must be > 1.0"),
        ({"growth_factor": math.nan}, "growth factor must be > 1.0"),
        ({"backoff_factor": 1.0}, "backoff factor must be < 1.0"),
        ({"backoff_factor": math.nan}, "backoff factor must be < 1.0"),
        ({"backoff_factor": 0.0}, "backoff factor must be > 0.0"),
        ({"backoff_factor": -0.5}, "backoff factor must be > 0.0"),
        ({"init_scale": math.inf}, "init_scale must be finite"),
        ({"init_scale": math.nan}, "init_scale must be finite"),
        ({"init_scale": 1e39}, "init_scale must be finite"),
        ({"init_scale": 0.0}, "init_scale is below min_scale"),
        ({"init_scale": -4.0}, "init_scale is below min_scale"),
        ({"growth_interval": -1}, "growth_interval must be >= 0"),
        ({"hysteresis": 0}, "hysteresis must be >= 1"),
        ({"min_scale": 0.0}, "min_scale must be a normal"),
        ({"min_scale": math.nan}, "min_scale must be a normal"),
        ({"min_scale": 1e-40}, "min_scale must be a normal"),
        ({"min_scale": 2.0**17}, "init_scale is below min_scale"),
        ({"max_scale": 2.0**15}, "init_scale is above max_scale"),
        ({"max_scale": math.nan}, "init_scale is above max_scale"),
    ],
)
def test_a_value_out_of_range_is_an_error(config, problem):
    with pytest.raises(ScalerError, match=problem):
        GradScaler(**config)


def test_numbers_of_any_kind_are_options_and_change_no_dtype():
    scaler = GradScaler(
        init_scale=2**33,
        min_scale=Fraction(1, 2),
        max_scale=2**33,
        growth_interval=np.int64(1),
        hysteresis=np.int64(1),
        backoff_factor=np.float64(0.5),
    )
    assert scaler == eval(repr(scaler))
    with jax.enable_x64(True):
        for found_inf in (False, True):
            state = scaler.update(scaler.init(), jnp.array(found_inf))
            assert state.scale == (2.0**32 if found_inf else 2.0**33)
            dtypes = [leaf.dtype.name for leaf in state]
            assert dtypes == ["float32", "int32", "int32"]


def test_a_scale_that_is_a_python_number_is_one():
    scaler = GradScaler(growth_factor=1.5, growth_interval=1)
    state = scaler.init()._replace(scale=1024.0)
    assert scaler.update(state, jnp.array(False)).scale == 1536.0


def test_wide_and_complex_gradients_are_unscaled_without_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        state = GradScaler(init_scale=8.0).init()
        for dtype in (jnp.complex64, jnp.float64):
            scaled = GradScaler().scale(state, jnp.ones(2, dtype))
            (unscaled, found) = GradScaler().unscale(state, scaled)
            assert (unscaled.dtype, unscaled.tolist()) == (dtype, [1.0, 1.0])
            assert not found
            np.testing.assert_allclose(metrics(state, scaled)["grad_norm"], 2**0.5)


def test_an_unknown_option_is_told_the_nearest():
    with pytest.raises(ScalerTypeError, match="init_scal; did you mean 'init_scale'"):
        GradScaler(init_scal=2.0)


@pytest.mark.parametrize("device", ["cuda", 2.0])
def test_a_scaler_has_no_device_and_its_options_are_named(device):
    message = f"no device, and takes its options by name, .*: got {device!r}"
    with pytest.raises(ScalerTypeError, match=message):
        GradScaler(device)
    with pytest.raises(ScalerTypeError, match=message):
        GradScaler(device=device)
    with pytest.raises(ScalerTypeError, match=message + ", 1024.0"):
        GradScaler(device, 1024.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loss_is_scaled_by_a_state(enabled):
    with pytest.raises(ScalerTypeError, match=r"scaler\.scale\(state, loss\)"):
        GradScaler(enabled=enabled).scale(jnp.array(1.0))


def test_a_scaler_is_a_value():
    scaler, equal = GradScaler(hysteresis=2), GradScaler(hysteresis=2)
    assert scaler == equal
    assert len({scaler, equal, GradScaler()}) == 2
    assert pickle.loads(pickle.dumps(scaler)) == scaler
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaler.init_scale = 1.0


def test_a_scaler_is_a_static_argument():
    calls = []

    def update(scaler, state):
        calls.append(scaler)
        return scaler.update(state, True)

    update = jax.jit(update, static_argnums=0)
    for factor in (0.5, 0.25, 0.5):
        state = update(GradScaler(backoff_factor=factor), state_of(8.0))
        assert state.scale == 8.0 * factor
    assert [scaler.backoff_factor for scaler in calls] == [0.5, 0.25]


def test_a_disabled_scaler_does_nothing():
    scaler = GradScaler(enabled=False)
    state, loss = scaler.init(), {"loss": [object(), "text", jnp.float16(1.0)]}
    assert state.scale == 1
    assert scaler.scale(state, loss) == loss
    assert scaler.scale(state, loss["loss"][2]).dtype == jnp.float16
    assert scaler.update(state, True) is state
    assert scaler.update(state) is state
    assert scaler.update(state, new_scale=4.0) is state
    params, grads = jnp.ones(2), jnp.array([1.0, jnp.inf], jnp.float16)
    unscaled, found = scaler.unscale(state, grads)
    assert unscaled.dtype == jnp.float16
    assert unscaled.tolist() == grads.tolist()
    assert not found
    tx = optax.sgd(0.5)
    stepped = scaler.step(state, tx, grads, found, tx.init(params), params)
    assert stepped[0].tolist() == [0.5, -math.inf]
    assert stepped[2]


def test_a_disabled_scaler_undoes_the_scale_of_a_restored_state():
    params, scaler = jnp.array([1.0, 2.0]), GradScaler(enabled=False)
    restored = GradScaler().init()
    _, grads = value_and_grad(lambda p: (p**2).sum())(restored, params)
    by_hand = jax.grad(lambda p: scaler.scale(restored, (p**2).sum()))(params)
    for scaled in grads, by_hand:
        assert scaler.unscale(restored, scaled)[0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_is_refused(scale):
    scaler = GradScaler()
    state = scaler.init()
    with pytest.raises(ScalerError, match="finite"):
        scaler.update(state, new_scale=scale)
    with pytest.raises(ScalerError, match="finite"):
        GradScaler.load_state_dict(scaler.state_dict(state) | {"scale": scale})
