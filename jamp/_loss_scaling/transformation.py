"""Loss scaling inside an optax optimizer."""

from dataclasses import dataclass, fields
from typing import Any, Never

import jax
import jax.numpy as jnp
import optax

from jamp._errors import ScalerError, ScalerTypeError, did_you_mean
from jamp._loss_scaling import arguments, arithmetic
from jamp._loss_scaling.arguments import instances
from jamp._loss_scaling.arithmetic import outside_of_autocast, select
from jamp._loss_scaling.scaler import GradScaler
from jamp._loss_scaling.scaler_state import ScalerState
from jamp._loss_scaling.states import RESTORE, DynamicLossScalingState
from jamp._tracing.checks import is_array
from jamp.pallas_kernels import all_finite


def dynamic_loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps,
    scaler: GradScaler | None = None,
    *,
    axis_name: Any = None,
    **misplaced: Never,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to take gradients of a scaled loss.

    Each update unscales the gradients, and the inner optimizer sees them as if the loss
    had never been scaled. If one of them is inf or NaN the step is skipped: updates are
    zero, the inner state stays as it was, schedule counts included, and the scale backs
    off.

        tx = jamp.dynamic_loss_scaling(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        )
        opt_state = tx.init(params)
        ...
        loss, grads = jamp.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    What comes before it in an `optax.chain` sees scaled gradients. What comes after it,
    or wraps it, takes skipped steps too: a schedule counts them, and weight decay moves
    the parameters. To accumulate gradients, let it wrap `optax.MultiSteps`: the scale
    stays as it is during a batch, and an overflow in one micro-batch skips the whole
    batch. The other way round, `optax.MultiSteps` never forgets an inf.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      scaler: how the scale changes; by default `GradScaler()`.
      axis_name: name or names of the mapped axes (`jax.shard_map`, `jax.pmap`,
        `jax.vmap`) over which an overflow on one shard skips the step on all. Arrays
        sharded under `jax.jit` need none.

    Returns:
      An optimizer whose state is a `DynamicLossScalingState`. Its update passes further
      arguments on; one named `grad` is unscaled first, and gradients of a function have
      to be.

    Raises:
      ScalerError: `init` got float16 parameters, or `update` float16 gradients; or, at
        `init`, something in `inner` scales losses too, or, at `update`, `axis_name`
        names no mapped axis.
      ScalerTypeError: `inner` is no optimizer, `scaler` no `GradScaler`, or `axis_name`
        neither a name nor several.
    """
    if misplaced:
        raise ScalerTypeError(_misplaced(list(misplaced)))
    inner = _optimizer(inner)
    known = isinstance(scaler, GradScaler | None)
    hint = "scaler must be a jamp.GradScaler, as jamp.GradScaler(init_scale=1024.0) is;"
    arguments.expect(known, scaler, hint)
    inner = optax.with_extra_args_support(inner)
    axes = arguments.mapped_axes(axis_name)
    scaling = _LossScaling(inner, scaler or GradScaler(), axes)
    return optax.GradientTransformationExtraArgs(scaling.init, scaling.update)


def _optimizer(inner: Any) -> optax.GradientTransformation:
    inner = arguments.without_multi_steps(inner)
    if isinstance(inner, optax.GradientTransformation):
        return inner
    hint = ": call it, as in optax.adamw(1e-3)" if callable(inner) else ""
    if isinstance(getattr(inner, "tx", None), optax.GradientTransformation):
        hint = ", which holds one: wrap that one, before this is made of it"
    if isinstance(inner, GradScaler):
        hint = ": the optimizer comes first, dynamic_loss_scaling(tx, scaler)"
    raise ScalerTypeError(
        f"inner must be an optax optimizer, got {type(inner).__name__}{hint}"
    )


def _misplaced(names: list[str]) -> str:
    """What to do with options that `dynamic_loss_scaling` does not take."""
    known = [option.name for option in fields(GradScaler)]
    if set(names) <= set(known):
        return (
            "the options of the scaler go to the scaler: dynamic_loss_scaling(inner, "
            f"jamp.GradScaler({', '.join(f'{name}=...' for name in names)}))"
        )
    if names == ["misplaced"]:  # as it hands on whatever the signature names
        return (
            "optax.inject_hyperparams goes inside: dynamic_loss_scaling("
            "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3))"
        )
    hint = did_you_mean(names[0], [*known, "scaler", "axis_name"])
    return (
        f"dynamic_loss_scaling takes scaler and axis_name, not {', '.join(names)}{hint}"
    )


@dataclass(frozen=True)
class _LossScaling:
    """An optimizer and the scaler of its gradients; see `dynamic_loss_scaling`."""

    inner: optax.GradientTransformationExtraArgs
    scaler: GradScaler
    axis_name: Any

    def init(self, params: Any) -> DynamicLossScalingState:
        if self.scaler.enabled:
            arguments.refuse_float16(params, "the parameters")
        inner_state = self.inner.init(params)
        if instances(inner_state, (DynamicLossScalingState, ScalerState)):
            raise ScalerError(
                "dynamic_loss_scaling of an optimizer that scales losses itself would "
                "unscale gradients twice: leave one of the two out"
            )
        return DynamicLossScalingState(
            scaler_state=self.scaler.init(),
            last_step_skipped=jnp.array(False),
            skipped_steps=jnp.zeros((), jnp.int32),
            total_steps=jnp.zeros((), jnp.int32),
            overflowed=jnp.array(False),
            inner_state=inner_state,
        )

    @outside_of_autocast
    def update(
        self,
        updates: Any,
        state: DynamicLossScalingState,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, DynamicLossScalingState]:
        if isinstance(updates, DynamicLossScalingState):
            raise ScalerTypeError(
                "the gradients come first: tx.update(grads, opt_state, params)"
            )
        _check_state(state)
        if self.scaler.enabled:
            arguments.refuse_narrowed(updates, params)
        grads, found = self.scaler.unscale(state.scaler_state, updates)
        if "grad" in extra_args:
            unscaled, too = self.scaler.unscale(state.scaler_state, extra_args["grad"])
            extra_args["grad"], found = unscaled, found | too
        found = self._anywhere(found)
        if self.scaler.enabled:
            found = found | state.overflowed
        grads = arithmetic.as_if_finite(found, grads)
        if "grad" in extra_args:
            extra_args["grad"] = arithmetic.as_if_finite(found, extra_args["grad"])
        if isinstance(state.inner_state, optax.MultiStepsState):
            # Its running mean would keep an inf.
            grads = select(found, jax.tree.map(jnp.zeros_like, grads), grads)
        try:
            updates, inner_state = self.inner.update(
                grads, state.inner_state, params, **extra_args
            )
        except (TypeError, ValueError) as error:
            difference = "" if params is None else arguments.differences(grads, params)
            if not difference:
                raise
            raise ScalerTypeError(
                f"the gradients do not fit the parameters: {difference}; take them "
                "with jamp.value_and_grad, of the loss at these parameters"
            ) from error
        ended, unstepped = _end(state.inner_state, inner_state)
        if self.scaler.enabled:
            if arguments.holds_functions(extra_args):
                found = found | self._anywhere(~all_finite(updates))
            zeros = jax.tree.map(jnp.zeros_like, updates)
            updates, inner_state = select(
                found & ended, (zeros, unstepped), (updates, inner_state)
            )
        counters: tuple[Any, Any, Any, Any] = (
            self.scaler.update(state.scaler_state, found),
            found,
            state.skipped_steps + found.astype(jnp.int32),
            optax.safe_increment(state.total_steps),
        )
        counters = select(ended, counters, state[:4])
        return updates, DynamicLossScalingState(
            *counters, overflowed=found & ~ended, inner_state=inner_state
        )

    def _anywhere(self, flag: jax.Array) -> jax.Array:
        """Whether a flag is set here, or on another of the shards."""
        if self.axis_name is None or not self.scaler.enabled:
            return flag
        return arithmetic.on_any_shard(flag, self.axis_name)


def _check_state(state: Any) -> None:
    """Raises unless a state is one that `init` or `update` returned."""
    if isinstance(state, DynamicLossScalingState):
        return
    advice = (
        "to go on from a state of the inner optimizer use "
        "tx.init(params)._replace(inner_state=state)"
    )
    if isinstance(state, dict) and {*DynamicLossScalingState._fields} <= {*state}:
        advice = RESTORE
    kind = "an array" if is_array(state) else f"a {type(state).__name__}"
    raise ScalerTypeError(f"state is {kind}, not what tx.init returned; {advice}")


def _end(old: Any, new: Any) -> tuple[jax.Array, Any]:
    """Whether an update ended a step, and the inner state if that step is skipped."""
    if not isinstance(old, optax.MultiStepsState):
        return jnp.array(True), old
    # The sums start anew; the optimizer inside has not stepped.
    kept = {"inner_opt_state": old.inner_opt_state, "gradient_step": old.gradient_step}
    return new.gradient_step != old.gradient_step, new._replace(**kept)
