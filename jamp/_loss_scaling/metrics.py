"""`jamp.metrics`: what a training step logs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jamp._dtypes import widened
from jamp._loss_scaling.arguments import mapped_axes, refuse_stack
from jamp._loss_scaling.arithmetic import outside_of_autocast, over_axes
from jamp._loss_scaling.states import DynamicLossScalingState, find_state


@outside_of_autocast
def metrics(
    opt_state: Any, grads: Any = None, *, axis_name: Any = None
) -> dict[str, jax.Array]:
    """Scalars of a training step for a logger, as arrays on the device.

    Does not wait for the device, and may be part of a jitted step. The arrays are
    copies: they can be read after `opt_state` was donated to the next step.

        loss, grads = jamp.value_and_grad(loss_fn)(opt_state, params, batch)
        logged = {"loss": loss, **jamp.metrics(opt_state, grads)}
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: as for `jamp.loss_scale`. Together with `grads` it is the state that
        scaled them, from before the update, which may change the scale.
      grads: gradients of the scaled loss, for `grad_norm`.
      axis_name: name or names of the mapped axes over which every leaf of `grads` is
        sharded inside `jax.shard_map`. Arrays sharded under `jax.jit` need none.

    Returns:
      A dict of scalars:

      - `loss_scale`, float32;
      - `growth_tracker`, int32, as in `jamp.ScalerState`;
      - `last_step_skipped`, bool, and `skipped_steps` and `total_steps`, int32, as in
        `jamp.DynamicLossScalingState`: what the updates so far have found. A
        `ScalerState` does not know them, and gives none;
      - `grad_norm`, float32, if there are `grads`: the norm of the unscaled gradients,
        inf or NaN where one of them is, where this step will be skipped, or where
        float32 does not hold it.

    Raises:
      ScalerError: `opt_state` holds no loss scale, or several, or `axis_name` names no
        mapped axis.
      ScalerTypeError: `axis_name` is neither a name nor several.
    """
    state = find_state(opt_state, "; it comes first: metrics(opt_state, grads)")
    found = {}
    if isinstance(state, DynamicLossScalingState):
        counters = ("last_step_skipped", "skipped_steps", "total_steps")
        found = {name: getattr(state, name) for name in counters}
        state = state.scaler_state
    if grads is not None:
        refuse_stack(state.scale)
    found = {"loss_scale": state.scale, "growth_tracker": state.growth_tracker, **found}
    arrays = {name: jnp.asarray(value) for name, value in found.items()}
    axes = mapped_axes(axis_name)
    with over_axes(axes):
        return dict(_scalars(arrays, grads, axes))


# One program in an eager loop too, whose results are not its arguments' buffers.
@functools.partial(jax.jit, static_argnums=2)
def _scalars(
    found: dict[str, jax.Array], grads: Any, axis_name: Any
) -> dict[str, jax.Array]:
    """What was found, and the norm of gradients; finite where float32 holds it."""
    if grads is None:
        return found
    inverse = 1 / found["loss_scale"]
    absolute = [
        widened(jnp.abs(leaf))
        for leaf in jax.tree.leaves(grads)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    sizes = [(a * inverse.astype(a.dtype)).astype(jnp.float32) for a in absolute]
    largest = functools.reduce(
        jnp.maximum, [jnp.max(size, initial=0) for size in sizes], jnp.float32(0)
    )
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    # The squares of large and small numbers do not fit into float32. A power of two,
    # so that nothing is rounded; its inverse fits too.
    unit = jnp.ldexp(jnp.float32(1), jnp.clip(jnp.frexp(largest)[1], -100, 100))
    squares = sum((jnp.sum(jnp.square(size / unit)) for size in sizes), start=0.0)
    if axis_name is not None:
        squares = jax.lax.psum(squares, axis_name)
    # GradScaler.unscale skips such a step too: the scale is too large to divide by.
    norm = jnp.where(inverse == 0, jnp.inf, jnp.sqrt(squares) * unit)
    return {**found, "grad_norm": norm}
