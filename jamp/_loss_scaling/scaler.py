"""`jamp.GradScaler`: dynamic loss scaling as pure functions of a small state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Never

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._errors import ScalerError, ScalerTypeError
from jamp._loss_scaling import arguments, arithmetic, torch_calls
from jamp._loss_scaling.arguments import (
    LARGEST,
    LARGEST_COUNT,
    SAVED_KEYS,
    SMALLEST_NORMAL,
    expect,
)
from jamp._loss_scaling.arithmetic import outside_of_autocast, select
from jamp._loss_scaling.scaler_state import ScalerState
from jamp._loss_scaling.torch_calls import takes_state
from jamp.pallas_kernels import all_finite, unscale_and_check

_STEP = "step(state, tx, grads, found_inf, opt_state, params)"
# Below it, where denormal numbers are flushed, a scale is zero.
_FLOOR = "a normal float32 number above 0, or None"
# What an option may be, that in words, and what it becomes.
_NUMBER = (Real, "a Python number", float)
_OPTIONAL = (Real | None, "a Python number", float)
_COUNT = (Integral, "an int", int)
_OPTIONS: dict[str, tuple[Any, str, type]] = {
    "init_scale": _NUMBER,
    "growth_factor": _NUMBER,
    "backoff_factor": _NUMBER,
    "growth_interval": _COUNT,
    "enabled": (bool | np.bool_, "True or False", bool),
    "min_scale": _OPTIONAL,
    "max_scale": _OPTIONAL,
    "hysteresis": _COUNT,
}


@torch_calls.with_named_options
@dataclass(frozen=True)
class GradScaler:
    """Scales the loss, so that small gradients do not vanish in float16.

    The scale grows while gradients are finite, and backs off when one overflows; that
    step is skipped. A scaler is an immutable description; what changes is the
    `ScalerState` that its methods take and return, under `jax.jit` too. None of them
    waits for the device but `state_dict`, which cannot be traced. Most loops want
    `jamp.dynamic_loss_scaling`, which does all of it inside an optax optimizer.

        state = scaler.init()
        ...
        scaled = jax.grad(lambda p: scaler.scale(state, loss_fn(p)))(params)
        grads, found_inf = scaler.unscale(state, scaled)
        params, opt_state, stepped = scaler.step(
            state, tx, grads, found_inf, opt_state, params
        )
        state = scaler.update(state, found_inf)

    Attributes:
      init_scale: the scale to begin with.
      growth_factor: what the scale is multiplied by after `growth_interval` finite
        steps in a row; above 1.
      backoff_factor: what it is multiplied by after an overflow; below 1.
      growth_interval: how many finite steps it takes to grow; 0 means never.
      enabled: False makes every method pass its input through. A scale that a restored
        state has, other than the 1 of `init`, still holds for the loss and for its
        gradients.
      min_scale: the scale never falls below it; by default the smallest normal float32
        number. None is torch's behaviour: no floor, and a scale that has fallen to 0
        stays there.
      max_scale: the scale never grows above it; None for float32's range.
      hysteresis: back off only after so many overflows in a row, as apex does, and
        DeepSpeed with `consecutive_hysteresis`; each of them skips its step. A count
        that starts anew only when the scale grows, as Megatron's, is not offered.

    Raises:
      ScalerError: a value out of range.
      ScalerTypeError: a value of the wrong type, or a device, as in torch.
    """

    device: InitVar[None] = None
    _: KW_ONLY
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    min_scale: float | None = SMALLEST_NORMAL
    max_scale: float | None = None
    hysteresis: int = 1

    def __post_init__(self, device: None) -> None:
        if device is not None:
            raise torch_calls.no_device(device)
        options = {name: getattr(self, name) for name in _OPTIONS}
        for name, value in _checked(options).items():
            object.__setattr__(self, name, value)
        low, high = self.min_scale, self.max_scale
        positive = low is None or self.backoff_factor > 0
        for fine, problem in (
            (self.growth_factor > 1, "the growth factor must be > 1.0"),
            (self.backoff_factor < 1, "the backoff factor must be < 1.0"),
            (positive, "the backoff factor must be > 0.0"),
            (abs(self.init_scale) <= LARGEST, "init_scale must be finite in float32"),
            (self.growth_interval >= 0, "growth_interval must be >= 0"),
            (self.growth_interval <= LARGEST_COUNT, "growth_interval must be an int32"),
            (self.hysteresis >= 1, "hysteresis must be >= 1"),
            (self.hysteresis <= LARGEST_COUNT, "hysteresis must be an int32"),
            (low is None or low >= SMALLEST_NORMAL, f"min_scale must be {_FLOOR}"),
            (low is None or low <= self.init_scale, "init_scale is below min_scale"),
            (high is None or high >= self.init_scale, "init_scale is above max_scale"),
        ):
            if not fine:
                raise ScalerError(f"{problem}: {self}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            hint = (
                f": take {torch_calls.INSTEAD[name]}"
                if name in torch_calls.INSTEAD
                else ""
            )
            raise AttributeError(
                f"'GradScaler' object has no attribute {name!r}{hint}",
                name=name,
                obj=self,
            )

    def init(self, *params: Never) -> ScalerState:
        """The state to begin with; a disabled scaler has a scale of 1."""
        if params:
            raise torch_calls.no_optimizer()
        return ScalerState(
            scale=jnp.asarray(self.init_scale if self.enabled else 1.0, jnp.float32),
            growth_tracker=jnp.zeros((), jnp.int32),
            hysteresis_tracker=jnp.zeros((), jnp.int32),
        )

    def scale(self, state: ScalerState, outputs: Any = None) -> Any:
        """Multiplies a loss, or every array of a pytree, by the scale.

        Args:
          state: the scaler's state.
          outputs: arrays or numbers. A 16-bit scalar is scaled in float32 and stays so;
            any other floating array keeps its dtype, integers become float32. A scaler
            that is disabled keeps all dtypes.

        Raises:
          ScalerError: an int is too large for a float.
          ScalerTypeError: a leaf is no number, or the state or the loss is left out.
        """
        torch_calls.check_state(state, "scale(state, loss)")
        hint = "there is no loss: scale(state, loss) takes two, and a function that"
        expect(outputs is not None, outputs, f"{hint} computes one has to return it;")
        if not self.enabled:
            return arithmetic.times(outputs, state.scale)
        return arithmetic.scaled(state.scale, outputs)

    # Gradients taken under an autocast are in 16 bits, in which they would vanish.
    @takes_state("unscale(state, grads)")
    @outside_of_autocast
    def unscale(self, state: ScalerState, grads: Any) -> tuple[Any, jax.Array]:
        """Divides gradients by the scale, and checks them for overflows.

        Args:
          state: the scaler's state.
          grads: gradients of the scaled loss.

        Returns:
          The gradients in their own dtypes, and found_inf, bool[]: whether one of them
          is inf or NaN, before or after, or the scale is too large to divide by.

        Raises:
          ScalerError: gradients are float16, because their parameters are.
        """
        inverse = 1 / state.scale
        if not self.enabled:
            return arithmetic.times(grads, inverse), jnp.array(False)
        what = "Attempting to unscale FP16 gradients: the gradients"
        arguments.refuse_float16(grads, what)
        for path, leaf in tree_leaves_with_path(grads):
            at = f" at {keystr(path)}" if path else ""
            expect(hasattr(leaf, "dtype"), leaf, f"the gradients{at} must be arrays,")
        unscaled, found_inf = unscale_and_check(grads, inverse)
        # Where denormal numbers are flushed, the inverse of a scale above 2**126 is
        # zero, and with it every gradient.
        return unscaled, found_inf | (inverse == 0)

    @takes_state("update(state, found_inf)")
    @outside_of_autocast
    def update(
        self, state: ScalerState, found_inf: Any = None, new_scale: Any = None
    ) -> ScalerState:
        """The state after a step.

        Args:
          state: the state before.
          found_inf: what `unscale` found, a bool[] or a pytree of several.
          new_scale: a scale to set instead, brought into the scaler's bounds; the
            counters stay as they are. Where a JAX array is not positive and finite,
            which is known too late for an error, the scale stays as it is too.

        Raises:
          ScalerError: neither is given, or a new scale is not positive and finite.
          ScalerTypeError: one of them has the wrong type.
        """
        if not self.enabled:
            return state
        if new_scale is not None:
            given = arguments.new_scale_of(state.scale, new_scale)
            scale = jnp.clip(given, self.min_scale, self.max_scale)
            return state._replace(scale=scale)
        found = arguments.any_of(found_inf, "update")
        state = state._replace(
            # That of a restored state may be of a scaler with other bounds.
            scale=jnp.clip(state.scale, self.min_scale, self.max_scale)
        )
        overflows = jnp.minimum(state.hysteresis_tracker + 1, self.hysteresis)
        backs_off = found & (overflows >= self.hysteresis)
        tracker = optax.safe_increment(state.growth_tracker)
        # It is more if the interval was made shorter since.
        grows = ~found & (tracker >= self.growth_interval) & (self.growth_interval > 0)
        grown = arithmetic.product(state.scale, self.growth_factor)
        grown = jnp.clip(grown, max=self.max_scale)
        scale = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        backed_off = arithmetic.product(state.scale, self.backoff_factor)
        backed_off = jnp.clip(backed_off, min=self.min_scale)
        return ScalerState(
            scale=jnp.where(backs_off, backed_off, scale),
            growth_tracker=jnp.where(found | grows, 0, tracker),
            hysteresis_tracker=jnp.where(found, overflows, 0),
        )

    @takes_state(_STEP)
    @outside_of_autocast
    def step(
        self,
        state: ScalerState,
        tx: optax.GradientTransformation | optax.MultiSteps,
        grads: Any,
        found_inf: Any,
        opt_state: Any,
        params: Any,
        **extra_args: Any,
    ) -> tuple[Any, Any, jax.Array]:
        """Takes a step of an optimizer, unless a gradient overflowed.

        Args:
          state: the scaler's state, which all methods take; `found_inf` alone decides.
          tx: the optimizer.
          grads: gradients, unscaled.
          found_inf: what `unscale` found, a bool[] or a pytree of several.
          opt_state: the optimizer's state.
          params: the parameters.
          **extra_args: further arguments of `tx.update`.

        Returns:
          Parameters and optimizer state, as they were if the step was skipped, and a
          bool[] that says whether it was taken.

        Raises:
          ScalerError: the optimizer scales the loss itself, or found_inf is missing.
        """
        tx = arguments.without_multi_steps(tx)
        second = f"an optax optimizer comes second: scaler.{_STEP};"
        if isinstance(getattr(tx, "tx", None), optax.GradientTransformation):
            second += " its tx and its state are what to hand over;"
        expect(isinstance(tx, optax.GradientTransformation), tx, second)
        if arguments.instances(opt_state, ScalerState):
            raise ScalerError(
                "the optimizer is one of jamp.dynamic_loss_scaling, which unscales and "
                "skips by itself: call its update, or hand step the inner optimizer"
            )
        found = arguments.any_of(found_inf, "step") if self.enabled else None
        grads = grads if found is None else arithmetic.as_if_finite(found, grads)
        update = optax.with_extra_args_support(tx).update
        updates, new_opt_state = update(grads, opt_state, params, **extra_args)
        stepped = (optax.apply_updates(params, updates), new_opt_state)
        if found is None:
            return *stepped, jnp.array(True)
        if arguments.holds_functions(extra_args):
            found = found | ~all_finite(updates)
        return *select(found, (params, opt_state), stepped), ~found

    @takes_state("state_dict(state)")
    def state_dict(self, state: ScalerState) -> dict[str, Any]:
        """Python numbers under torch's five keys, to load here or in torch.

        Waits for the device. A disabled scaler gives an empty dict, as in torch. The
        count of overflows in a row, which matters with `hysteresis`, is not in it: to
        resume exactly, save the state itself.

        Args:
          state: the scaler's state.

        Raises:
          ScalerError: the state is traced, as under `jax.jit`.
        """
        if not self.enabled:
            return {}
        if isinstance(state.scale, jax.core.Tracer):
            raise ScalerError(
                "state_dict gives Python numbers, of which a traced state has none: "
                "call it outside of jax.jit, with the state that the step returned"
            )
        factors = self.growth_factor, self.backoff_factor, self.growth_interval
        values = float(state.scale), *factors, int(state.growth_tracker)
        return dict(zip(SAVED_KEYS, values, strict=True))

    @torch_calls.of_the_class
    def load_state_dict(
        cls, state_dict: Mapping[str, Any], **options: Any
    ) -> tuple[GradScaler, ScalerState]:
        """The scaler and state of a dict from here or from torch.

        Args:
          state_dict: what `state_dict` of jamp or torch gave.
          **options: what the dict does not hold: `min_scale`, `max_scale`,
            `hysteresis`; with `enabled=False` the dict is not read.

        Returns:
          A scaler that begins with the scale of the dict, brought into its bounds, and
          has its factors and interval; and its state.

        Raises:
          ScalerError: the dict is empty, lacks a key, or has a value out of range.
          ScalerTypeError: it is no dict, a value in it is no number, or an option is
            in it too.
        """
        both = options.keys() & {*SAVED_KEYS, "init_scale"}
        if both:
            raise ScalerTypeError(
                f"the state dict holds {', '.join(sorted(both))}: change it there"
            )
        if not options.get("enabled", cls.enabled):
            disabled = cls(**options)
            return disabled, disabled.init()
        _checked(options)
        low = options.get("min_scale", cls.min_scale)
        high = options.get("max_scale", cls.max_scale)
        numbers = arguments.saved_numbers(state_dict, negative=low is None)
        scale, growth_factor, backoff_factor, interval, tracker = numbers
        scale = scale if low is None else max(scale, low)
        scale = scale if high is None else min(scale, high)
        scaler = cls(
            init_scale=scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=int(interval),
            **options,
        )
        count = jnp.asarray(int(tracker), jnp.int32)
        return scaler, scaler.init()._replace(growth_tracker=count)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a scaler as Python's own numbers, which change no dtype."""
    found = {}
    for name in filter(options.__contains__, _OPTIONS):
        value, (kinds, words, kind) = options[name], _OPTIONS[name]
        # A bool is an int too.
        misplaced = isinstance(value, bool) and kind is not bool
        if misplaced or not isinstance(value, kinds):
            raise ScalerTypeError(f"{name} must be {words}, got {value!r}")
        try:
            found[name] = None if value is None else kind(value)
        except OverflowError as error:
            raise ScalerError(f"{name} is too large for a float") from error
    return found
