"""A GradScaler is saved as torch's is, and goes on where it was."""

import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from scaler_reference import assert_steps, in_a_scan, same, state_of, traces

from jamp import GradScaler, ScalerError, ScalerTypeError

TRACES = traces()


def test_a_state_dict_holds_torchs_five_keys():
    scaler = GradScaler(growth_factor=3.0, backoff_factor=0.1, growth_interval=7)
    values = scaler.state_dict(state_of(12.5, 3))
    assert values == {
        "scale": 12.5,
        "growth_factor": 3.0,
        "backoff_factor": 0.1,
        "growth_interval": 7,
        "_growth_tracker": 3,
    }
    kinds = [type(value) for value in values.values()]
    assert kinds == [float, float, float, int, int]


def test_a_loaded_scaler_goes_on_where_the_saved_one_was():
    trace = next(trace for trace in TRACES if trace.name == "init_pi")
    states = in_a_scan(trace.scaler.update, trace.scaler.init(), trace.events)
    halfway = jax.tree.map(lambda leaf: leaf[99], states)
    saved = trace.scaler.state_dict(halfway)
    scaler, state = GradScaler.load_state_dict(saved, min_scale=None)
    assert same(state[:2], halfway[:2])
    rest = trace._replace(scale=trace.scale[100:], tracker=trace.tracker[100:])
    after = in_a_scan(scaler.update, state, trace.events[100:])
    assert_steps(after, rest, trace.normal[100:])


def test_a_traced_state_has_no_state_dict():
    with pytest.raises(ScalerError, match=r"outside of jax\.jit"):
        jax.jit(GradScaler().state_dict)(state_of(8.0))


def test_what_a_state_dict_lacks_is_given_when_it_is_loaded():
    options = {"min_scale": 1.0, "max_scale": 2.0**20, "hysteresis": 3}
    scaler = GradScaler(growth_interval=9, **options)
    saved = scaler.state_dict(scaler.init())
    assert GradScaler.load_state_dict(saved, **options)[0] == scaler


def test_loading_a_dict_that_lacks_a_key_names_it():
    saved = GradScaler().state_dict(state_of(1.0))
    with pytest.raises(ScalerError, match=r"dict is empty, .* enabled=False makes"):
        GradScaler.load_state_dict({})
    for key in saved:
        with pytest.raises(ScalerError, match=f"lacks '{key}';"):
            GradScaler.load_state_dict({k: v for k, v in saved.items() if k != key})


@pytest.mark.parametrize("saved", [5, None, "scale", ["scale"], np.ones(2)], ids=repr)
def test_what_is_no_dict_is_not_loaded(saved):
    message = f"load_state_dict takes .*, got {re.escape(repr(saved))}$"
    with pytest.raises(ScalerTypeError, match=message):
        GradScaler.load_state_dict(saved)


def test_a_disabled_scaler_saves_and_loads_nothing():
    scaler = GradScaler(enabled=False)
    assert scaler.state_dict(scaler.init()) == {}
    for saved in ({}, GradScaler().state_dict(state_of(8.0))):
        loaded, state = GradScaler.load_state_dict(saved, enabled=False)
        assert loaded == scaler
        assert same(state, scaler.init())


@pytest.mark.parametrize(
    ("scale", "options", "expected"),
    [
        (2.0**20, {"max_scale": 64.0}, 64.0),
        (2.0, {"min_scale": 2.0**17}, 2.0**17),
        (2.0**20, {}, 2.0**20),
        (0.0, {}, GradScaler().min_scale),
    ],
)
def test_a_loaded_scale_is_brought_into_the_bounds(scale, options, expected):
    saved = GradScaler().state_dict(state_of(scale))
    scaler, state = GradScaler.load_state_dict(saved, **options)
    assert float(state.scale) == scaler.init_scale == expected


@dataclass(frozen=True)
class Bounded(GradScaler):
    """A scaler with other defaults."""

    init_scale: float = 2.0**8
    max_scale: float | None = 2.0**10


@dataclass(frozen=True)
class Disabled(GradScaler):
    """A scaler that is disabled unless it is told otherwise."""

    enabled: bool = False


def test_a_loaded_scaler_has_the_bounds_of_its_class():
    saved = GradScaler().state_dict(state_of(2.0**16))
    scaler, state = Bounded.load_state_dict(saved)
    assert float(state.scale) == scaler.init_scale == scaler.max_scale == 2.0**10
    assert Disabled.load_state_dict({})[0] == Disabled()
