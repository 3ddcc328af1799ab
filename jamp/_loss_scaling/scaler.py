"""`jamp.GradScaler`: dynamic loss scaling as pure functions of a small state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jamp._autocast import as_written
from jamp._errors import ScalerError, ScalerTypeError
from jamp.pallas_kernels import unscale_and_check

_KEYS = "scale growth_factor backoff_factor growth_interval _growth_tracker".split()
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


class ScalerState(NamedTuple):
    """What changes from step to step; a pytree of arrays.

    Attributes:
      scale: the factor of the loss, float32[].
      growth_tracker: finite steps since the scale last changed, int32[].
      hysteresis_tracker: overflows in a row, int32[]; counted up to the scaler's
        `hysteresis`.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array


@dataclass(frozen=True)
class GradScaler:
    """Scales the loss, so that small gradients do not vanish in float16.

    The scale grows while gradients are finite, and backs off when one overflows; that
    step is skipped. A scaler is an immutable description; what changes is the
    `ScalerState` that its methods take and return, all of them under `jax.jit` too.
    None waits for the device. Most loops want `jamp.dynamic_loss_scaling`, which does
    all of it inside an optax optimizer.

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
      enabled: False makes every method pass its input through.
      min_scale: the scale never falls below it; by default the smallest normal float32
        number. None is torch's behaviour: no floor, and a scale that has fallen to 0
        stays there.
      max_scale: the scale never grows above it; None for float32's range.
      hysteresis: back off only after so many overflows in a row, as DeepSpeed does;
        each of them skips its step.

    Raises:
      ScalerError: a value out of range.
      ScalerTypeError: a device is given, as in torch.
    """

    device: InitVar[None] = None
    _: KW_ONLY
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    min_scale: float | None = _SMALLEST_NORMAL
    max_scale: float | None = None
    hysteresis: int = 1

    def __post_init__(self, device: None) -> None:
        if device is not None:
            raise ScalerTypeError(
                "a jamp.GradScaler has no device, and takes its options by name, as in "
                f"GradScaler(init_scale=1024.0): got {device!r}"
            )
        low, high = self.min_scale, self.max_scale
        positive = low is None or self.backoff_factor > 0
        for fine, problem in (
            (self.growth_factor > 1, "the growth factor must be > 1.0"),
            (self.backoff_factor < 1, "the backoff factor must be < 1.0"),
            (positive, "the backoff factor must be > 0.0"),
            (abs(self.init_scale) <= _LARGEST, "init_scale must be finite in float32"),
            (self.growth_interval >= 0, "growth_interval must be >= 0"),
            (self.hysteresis >= 1, "hysteresis must be >= 1"),
            (low is None or low > 0, "min_scale must be > 0, or None"),
            (low is None or low <= self.init_scale, "init_scale is below min_scale"),
            (high is None or high >= self.init_scale, "init_scale is above max_scale"),
        ):
            if not fine:
                raise ScalerError(f"{problem}: {self}")

    def init(self) -> ScalerState:
        """The state to begin with; a disabled scaler has a scale of 1."""
        return _state(self.init_scale if self.enabled else 1.0, 0)

    def scale(self, state: ScalerState, outputs: Any = None) -> Any:
        """Multiplies a loss, or every array of a pytree, by the scale.

        Args:
          state: the scaler's state.
          outputs: arrays or numbers. A 16-bit scalar is scaled in float32 and stays so;
            any other floating array keeps its dtype, integers become float32.

        Raises:
          ScalerTypeError: a leaf is no number, or the state is left out.
        """
        if outputs is None:
            raise ScalerTypeError("the state comes first: scaler.scale(state, loss)")
        if not self.enabled:
            return outputs
        return scaled(state.scale, outputs)

    # Gradients taken under an autocast are in 16 bits, in which they would vanish.
    @as_written
    def unscale(self, state: ScalerState, grads: Any) -> tuple[Any, jax.Array]:
        """Divides gradients by the scale, in one pass with the check for overflows.

        Args:
          state: the scaler's state.
          grads: gradients of the scaled loss.

        Returns:
          The gradients in their own dtypes, and found_inf, bool[]: whether one of them
          is inf or NaN, before or after, or the scale is too large to divide by.

        Raises:
          ScalerError: gradients are float16, because their parameters are.
        """
        if not self.enabled:
            return grads, jnp.array(False)
        refuse_float16(grads, "Attempting to unscale FP16 gradients: the gradients")
        inverse = 1 / state.scale
        unscaled, found_inf = unscale_and_check(grads, inverse)
        # Where denormal numbers are flushed, the inverse of a scale above 2**126 is
        # zero, and with it every gradient.
        return unscaled, found_inf | (inverse == 0)

    @as_written
    def update(
        self, state: ScalerState, found_inf: Any = None, new_scale: Any = None
    ) -> ScalerState:
        """The state after a step.

        Args:
          state: the state before.
          found_inf: what `unscale` found, a bool[] or a pytree of several.
          new_scale: a scale to set instead; the counters stay as they are.

        Raises:
          ScalerError: neither is given.
        """
        if not self.enabled:
            return state
        if new_scale is not None:
            return state._replace(scale=_scale(new_scale))
        found = _any(found_inf, "update")
        overflows = jnp.minimum(state.hysteresis_tracker + 1, self.hysteresis)
        backs_off = found & (overflows >= self.hysteresis)
        tracker = state.growth_tracker + 1
        grows = ~found & (tracker == self.growth_interval)
        grown = _product(state.scale, self.growth_factor)
        if self.max_scale is not None:
            grown = jnp.minimum(grown, self.max_scale)
        scale = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        backed_off = _product(state.scale, self.backoff_factor)
        if self.min_scale is not None:
            backed_off = jnp.maximum(backed_off, self.min_scale)
        return ScalerState(
            scale=jnp.where(backs_off, backed_off, scale),
            growth_tracker=jnp.where(found | grows, 0, tracker),
            hysteresis_tracker=jnp.where(found, overflows, 0),
        )

    @as_written
    def step(
        self,
        state: ScalerState,
        tx: optax.GradientTransformation,
        grads: Any,
        found_inf: Any,
        opt_state: Any,
        params: Any,
        **extra_args: Any,
    ) -> tuple[Any, Any, jax.Array]:
        """Takes a step of an optimizer, unless a gradient overflowed.

        Args:
          state: the scaler's state.
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
        del state
        if instances(opt_state, ScalerState):
            raise ScalerError(
                "the optimizer is one of jamp.dynamic_loss_scaling, which unscales and "
                "skips by itself: call its update, or hand step the inner optimizer"
            )
        update = optax.with_extra_args_support(tx).update
        updates, new_opt_state = update(grads, opt_state, params, **extra_args)
        stepped = (optax.apply_updates(params, updates), new_opt_state)
        if not self.enabled:
            return *stepped, jnp.array(True)
        found = _any(found_inf, "step")
        return *select(found, (params, opt_state), stepped), ~found

    def state_dict(self, state: ScalerState) -> dict[str, Any]:
        """Python numbers under torch's five keys, to load here or in torch.

        Waits for the device. A disabled scaler gives an empty dict, as in torch. The
        count of overflows in a row, which matters with `hysteresis`, is not in it: to
        resume exactly, save the state itself.
        """
        if not self.enabled:
            return {}
        factors = self.growth_factor, self.backoff_factor, self.growth_interval
        values = float(state.scale), *factors, int(state.growth_tracker)
        return dict(zip(_KEYS, values, strict=True))

    @classmethod
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
          ScalerError: the dict is empty, lacks a key, or its scale is not finite.
        """
        if not options.get("enabled", True):
            disabled = cls(**options)
            return disabled, disabled.init()
        if not state_dict:
            raise ScalerError(
                "The source state dict is empty, possibly because it was saved from a "
                "disabled instance of GradScaler."
            )
        missing = [key for key in _KEYS if key not in state_dict]
        if missing:
            raise ScalerError(
                f"the state dict lacks {', '.join(map(repr, missing))}; a GradScaler's "
                f"has {', '.join(map(repr, _KEYS))}"
            )
        scale, growth, backoff, interval, tracker = (state_dict[key] for key in _KEYS)
        scale = float(scale)
        low, high = options.get("min_scale", cls.min_scale), options.get("max_scale")
        scale = scale if low is None else max(scale, low)
        scale = scale if high is None else min(scale, high)
        scaler = cls(
            init_scale=scale,
            growth_factor=float(growth),
            backoff_factor=float(backoff),
            growth_interval=int(interval),
            **options,
        )
        return scaler, _state(scale, int(tracker))


def scaled(scale: jax.Array, outputs: Any) -> Any:
    """Every leaf times a scale; see `GradScaler.scale`."""

    def times(leaf: Any) -> jax.Array:
        if not is_number(leaf):
            raise ScalerTypeError(
                f"outputs must be arrays or numbers, got {type(leaf).__name__}"
            )
        array = jnp.asarray(leaf)
        inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        # Not promoted: float8 has no implicit promotion.
        wide = array.dtype if inexact and array.dtype.itemsize >= 4 else jnp.float32
        keeps = inexact and array.ndim > 0
        return (array.astype(wide) * scale).astype(array.dtype if keeps else wide)

    return jax.tree.map(times, outputs)


def is_number(leaf: Any) -> bool:
    """Whether a value is an array or number that can be scaled."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
        return False
    dtype = getattr(leaf, "dtype", np.dtype(type(leaf)))
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def refuse_float16(tree: Any, what: str) -> None:
    """Raises if a tree, which the message calls `what`, has float16 leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if getattr(leaf, "dtype", None) == jnp.float16
    ]
    if paths:
        shown = ", ".join(paths[:5]) + (" ..." if len(paths) > 5 else "")
        # A tree that is one array has no path.
        where = f" at {shown}" if shown else ""
        raise ScalerError(
            f"{what}{where} are float16: keep the parameters in float32 and let "
            "jamp.autocast cast them where they are used"
        )


def select(which: jax.Array, first: Any, second: Any) -> Any:
    """The first tree where a flag is set, else the second, element by element."""
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), first, second)


def _product(scale: jax.Array, factor: float) -> jax.Array:
    """`f32(f64(scale) * factor)`, which is torch's."""
    if abs(math.frexp(factor)[0]) == 0.5:
        return jnp.multiply(scale, jnp.float32(factor))
    with jax.enable_x64(True):
        product = scale.astype(jnp.float64) * np.float64(factor)
        return jnp.asarray(product, jnp.float32)


def _state(scale: float, tracker: int) -> ScalerState:
    return ScalerState(
        scale=jnp.asarray(scale, jnp.float32),
        growth_tracker=jnp.asarray(tracker, jnp.int32),
        hysteresis_tracker=jnp.zeros((), jnp.int32),
    )


def _scale(value: Any) -> jax.Array:
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise ScalerError(f"new_scale must be finite, got {value}")
    array = jnp.asarray(value, jnp.float32)
    if array.ndim:
        raise ScalerError(f"new_scale must be a scalar, got an array of {array.shape}")
    return array


def instances(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """The nodes of a tree, outermost only, that are of certain classes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def _any(found_inf: Any, method: str) -> jax.Array:
    flags = [jnp.asarray(flag, bool).any() for flag in jax.tree.leaves(found_inf)]
    if not flags:
        raise ScalerError(
            f"No inf checks were recorded prior to {method}: give it the found_inf "
            "that unscale returned" + (", or a new_scale" if method == "update" else "")
        )
    return jnp.stack(flags).any()
