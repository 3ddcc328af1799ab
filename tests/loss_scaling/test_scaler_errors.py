"""What the scaler is given is checked before it spoils a scale."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scaler_reference import bits, same, state_of

import jamp
from jamp import GradScaler, ScalerError, ScalerTypeError

W = jnp.array([1.0, 2.0])
SGD = optax.sgd(0.1)
SAVED = GradScaler().state_dict(state_of(8.0))

OPTIONS = {
    "init_scale": ["8", None, True, jnp.float32(8)],
    "growth_factor": ["2", [2.0]],
    "backoff_factor": [None],
    "growth_interval": [2000.0, "7", True],
    "hysteresis": [1.5],
    "min_scale": ["1"],
    "max_scale": [(1.0,)],
    "enabled": [1, "no"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_wrong_type_is_named(name):
    for value in OPTIONS[name]:
        with pytest.raises(ScalerTypeError, match=f"^{name} must be .*, got "):
            GradScaler(**{name: value})


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, int])
def test_an_option_may_be_any_number_that_python_can_read(kind):
    assert GradScaler(init_scale=kind(8)).init().scale == 8


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"growth_interval": 2**31}, "growth_interval must be an int32"),
        ({"hysteresis": 2**31}, "hysteresis must be an int32"),
        ({"init_scale": 10**400}, "init_scale is too large for a float"),
        ({"max_scale": 10**400}, "max_scale is too large for a float"),
    ],
)
def test_what_would_fail_at_an_update_fails_at_once(config, problem):
    with pytest.raises(ScalerError, match=problem):
        GradScaler(**config)
    largest = GradScaler(growth_interval=2**31 - 1, hysteresis=2**31 - 1)
    assert same(largest.update(state_of(8.0), False), state_of(8.0, 1))


STACK = jax.tree.map(lambda array: jnp.stack([array] * 2), state_of(8.0))
METHODS = {
    "scale": lambda scaler: scaler.scale(STACK, 1.0),
    "unscale": lambda scaler: scaler.unscale(STACK, W),
    "update": lambda scaler: scaler.update(STACK, jnp.array([True, False])),
    "state_dict": lambda scaler: scaler.state_dict(STACK),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_states_of_several_scalers_in_one_are_no_state(method):
    with pytest.raises(ScalerError, match=r"a stack of loss scales, of shape \(2,\)"):
        METHODS[method](GradScaler())


@pytest.mark.parametrize("scale", [True, jnp.array(True), "2", 2j, np.complex64(2)])
def test_a_new_scale_is_a_number(scale):
    with pytest.raises(ScalerTypeError, match="new_scale must be a number, got"):
        GradScaler().update(state_of(8.0), new_scale=scale)


@pytest.mark.parametrize("scale", [1e39, 1e-50, math.inf, math.nan, -4.0, 0.0])
def test_a_new_scale_is_positive_and_finite(scale):
    with pytest.raises(ScalerError, match="positive and finite in float32, got"):
        GradScaler().update(state_of(8.0), new_scale=scale)


@pytest.mark.parametrize("scale", [math.inf, math.nan, -4.0, 0.0])
def test_a_new_scale_on_a_device_that_is_not_positive_and_finite_changes_nothing(scale):
    update = jax.jit(lambda new: GradScaler().update(state_of(8.0, 3), False, new))
    assert same(update(jnp.float32(scale)), state_of(8.0, 3))
    assert bits(update(jnp.float32(5)).scale) == bits(jnp.float32(5))


@pytest.mark.parametrize("flag", ["yes", object(), [W, "no"], state_of(8.0)])
def test_a_flag_that_is_no_number_is_refused(flag):
    message = "found_inf must be what unscale returned, got"
    with pytest.raises(ScalerTypeError, match=message):
        GradScaler().update(state_of(8.0), flag)
    with pytest.raises(ScalerTypeError, match=message):
        GradScaler().step(state_of(8.0), SGD, W, flag, SGD.init(W), W)


@pytest.mark.parametrize("flag", [256.0, 256, {"w": W}])
def test_a_flag_that_is_a_scale_or_gradients_is_refused(flag):
    with pytest.raises(ScalerTypeError, match="a scale to set is new_scale="):
        GradScaler().update(state_of(8.0), flag)
    assert GradScaler().update(state_of(8.0), np.int32(1)).scale == 4.0


def test_a_loss_that_is_missing_is_said_to_be():
    for given in ((), (None,)):
        with pytest.raises(
            ScalerTypeError, match=r"there is no loss.* has to return it"
        ):
            GradScaler().scale(state_of(8.0), *given)


def test_an_int_that_is_no_int32_is_scaled_as_the_float_that_it_is():
    for number in (2**31, -(10**30)):
        for scaled in (
            GradScaler().scale(state_of(8.0), number),
            jamp.scale_loss(number, state_of(8.0)),
        ):
            assert same(scaled, jnp.float32(8 * float(number)))
    with pytest.raises(ScalerError, match="an int to scale is too large for a float"):
        GradScaler().scale(state_of(8.0), {"loss": 10**400})


def test_loading_into_a_scaler_that_is_there_says_that_it_returns_one():
    with pytest.raises(ScalerTypeError, match=r"scaler, state = .*load_state_dict"):
        GradScaler().load_state_dict(SAVED)


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("get_scale", "state.scale"),
        ("unscale_", "scaler.unscale(state, grads)"),
        ("set_backoff_factor", "dataclasses.replace(scaler, backoff_factor=...)"),
        ("get_growth_interval", "scaler.growth_interval"),
    ],
)
def test_a_method_of_torchs_that_is_not_there_says_what_stands_for_it(method, instead):
    with pytest.raises(AttributeError, match=re.escape(f"take {instead}")):
        getattr(GradScaler(), method)


def test_a_new_scale_that_is_no_number_is_refused():
    with pytest.raises(ScalerTypeError, match="new_scale must be a number, got '8'"):
        GradScaler().update(state_of(8.0), new_scale="8")


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scale", -8.0, ScalerError),
        ("scale", "large", ScalerTypeError),
        ("growth_factor", None, ScalerTypeError),
        ("backoff_factor", -0.5, ScalerError),
        ("growth_interval", 2.5, ScalerError),
        ("growth_interval", 2**31, ScalerError),
        ("_growth_tracker", -1, ScalerError),
        ("_growth_tracker", math.nan, ScalerError),
    ],
)
def test_a_saved_value_out_of_range_is_named(key, value, error):
    with pytest.raises(error, match=f"^'{key}' of the state dict "):
        GradScaler.load_state_dict(SAVED | {key: value})


@pytest.mark.parametrize("name", ["growth_interval", "init_scale"])
def test_an_option_that_a_state_dict_holds_is_changed_there(name):
    with pytest.raises(ScalerTypeError, match=f"the state dict holds {name}: change"):
        GradScaler.load_state_dict(SAVED, **{name: 5})


def test_an_option_of_the_wrong_type_is_named_where_a_state_is_loaded():
    with pytest.raises(ScalerTypeError, match="min_scale must be a Python number, got"):
        GradScaler.load_state_dict(SAVED, min_scale="1")


SWAPPED = {
    "scale": lambda scaler, state: scaler.scale(W, state),
    "unscale": lambda scaler, state: scaler.unscale({"w": W}, state),
    "update": lambda scaler, state: scaler.update(jnp.array(True), state),
    "step": lambda scaler, state: scaler.step(SGD, state, W, False, SGD.init(W), W),
    "state_dict": lambda scaler, state: scaler.state_dict(state._asdict()),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("method", SWAPPED)
def test_swapped_arguments_show_their_order(method, enabled):
    message = rf"the state comes first: scaler\.{method}\(state.*; got "
    with pytest.raises(ScalerTypeError, match=message):
        SWAPPED[method](GradScaler(enabled=enabled), state_of(8.0))


AS_IN_TORCH = {
    "step": lambda scaler: scaler.step(SGD),
    "update": lambda scaler: scaler.update(),
    "state_dict": lambda scaler: scaler.state_dict(),
}


@pytest.mark.parametrize("method", AS_IN_TORCH)
def test_calls_as_in_torch_are_told_how_to_be_written(method):
    message = rf"the state comes first: scaler\.{method}\(state"
    with pytest.raises(ScalerTypeError, match=message):
        AS_IN_TORCH[method](GradScaler())


def test_a_loss_without_a_state_is_what_came():
    with pytest.raises(ScalerTypeError, match=r"scale\(state, loss\).*; got ArrayImpl"):
        GradScaler().scale(W)


def test_a_step_asks_for_the_flag_before_it_runs_the_optimizer():
    with pytest.raises(ScalerError, match="prior to step: give it the found_inf"):
        GradScaler().step(state_of(8.0), SGD, W, SGD.init(W), False, W)


def test_a_step_without_an_optimizer_shows_the_order():
    with pytest.raises(ScalerTypeError, match=r"optimizer comes second.*; got float"):
        GradScaler().step(state_of(8.0), 0.1, W, False, SGD.init(W), W)


def scaling(inner):
    return jamp.dynamic_loss_scaling(inner)


NESTED = {
    "at once": scaling,
    "in a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "in chains": lambda tx: optax.chain(optax.chain(optax.chain(tx))),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "by parameter": lambda tx: optax.multi_transform({"a": tx}, {"w": "a"}),
    "if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "accumulated": lambda tx: optax.MultiSteps(tx, 2),
    "in a schedule": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(rate=0.1),
}


@pytest.mark.parametrize("place", NESTED)
def test_an_optimizer_that_scales_losses_is_not_wrapped_again(place):
    params = {"w": W}
    NESTED[place](SGD).init(params)
    with pytest.raises(ScalerError, match="unscale gradients twice"):
        scaling(NESTED[place](scaling(SGD))).init(params)


def test_a_step_without_found_inf_shows_its_arguments():
    scaler = GradScaler()
    with pytest.raises(ScalerTypeError, match=r"missing.*'params'; call scaler.step"):
        scaler.step(scaler.init(), SGD, W, SGD.init(W), W)


def test_what_holds_an_optimizer_is_told_to_hand_it_over():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    scaler = GradScaler()
    with pytest.raises(ScalerTypeError, match=r"its tx and its state.*got Optimizer"):
        scaler.step(scaler.init(), optimizer, W, False, None, W)


@pytest.mark.parametrize("kind", [np.float32, jnp.float32])
def test_a_scale_that_is_an_array_is_no_found_inf(kind):
    scaler = GradScaler()
    with pytest.raises(ScalerTypeError, match="a scale to set is new_scale"):
        scaler.update(scaler.init(), kind(1024))


def test_a_state_in_place_of_a_number_is_not_printed():
    scaler = GradScaler()
    state = jamp.dynamic_loss_scaling(SGD, scaler).init(W)
    for refused in (
        lambda: scaler.update(scaler.init(), new_scale=state),
        lambda: jamp.diagnose(jnp.sum, loss_scale=state)(W),
    ):
        with pytest.raises(TypeError, match="got one of type DynamicLossScalingState"):
            refused()
