"""The state of loss scaling inside an optimizer, and where it is in a user's trees."""

import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jamp._errors import JampWarning, ScalerError
from jamp._loss_scaling import arguments, arithmetic
from jamp._loss_scaling.arguments import instances
from jamp._loss_scaling.scaler import GradScaler
from jamp._loss_scaling.scaler_state import ScalerState
from jamp._tracing.locations import users_level

# Without a target, states come back as dicts.
RESTORE = "restore a checkpoint with tx.init(params) as its target"


class DynamicLossScalingState(NamedTuple):
    """State of `jamp.dynamic_loss_scaling`.

    Attributes:
      scaler_state: the scale and its counters.
      last_step_skipped: whether the last gradients overflowed, bool[].
      skipped_steps: how many did, int32[].
      total_steps: how many came, int32[].
      overflowed: whether a gradient of the batch that `optax.MultiSteps` is
        accumulating did, bool[]; False without it.
      inner_state: the state of the wrapped optimizer.
    """

    scaler_state: ScalerState
    last_step_skipped: jax.Array
    skipped_steps: jax.Array
    total_steps: jax.Array
    overflowed: jax.Array
    inner_state: Any


def loss_scale(opt_state: Any) -> jax.Array:
    """The scale of the loss, float32[].

    Args:
      opt_state: the state of an optimizer with `jamp.dynamic_loss_scaling` somewhere in
        it, or anything that holds one, such as a TrainState; or a `ScalerState`.

    Raises:
      ScalerError: it holds no loss scale, or several.
    """
    return find_scale(opt_state)


def last_step_skipped(opt_state: Any) -> jax.Array:
    """Whether the last step was skipped because a gradient overflowed, bool[].

    Args:
      opt_state: as for `jamp.loss_scale`, but for a `ScalerState`.

    Raises:
      ScalerError: it holds no loss scaling, or several.
    """
    state = find_state(opt_state)
    if not isinstance(state, DynamicLossScalingState):
        raise ScalerError(
            "a ScalerState does not know whether a step was skipped: GradScaler.step "
            "returns it"
        )
    return jnp.asarray(state.last_step_skipped)


def scale_loss(loss: Any, opt_state: Any) -> Any:
    """Multiplies a loss by the scale that an optimizer expects of its gradients.

    Args:
      loss: a loss, or a pytree of them; see `GradScaler.scale` for the dtypes.
      opt_state: as for `jamp.loss_scale`.

    Raises:
      ScalerError: it holds no loss scale, or several, or an int is too large for a
        float.
      ScalerTypeError: a loss is no number.
    """
    hint = "; the loss comes first: scale_loss(loss, opt_state)"
    arguments.expect(loss is not None, loss, "the loss must be a number,")
    return arithmetic.scaled(find_scale(opt_state, hint), loss)


def find_scale(tree: Any, hint: str = "") -> jax.Array:
    state = find_state(tree, hint)
    state = state.scaler_state if isinstance(state, DynamicLossScalingState) else state
    return jnp.asarray(state.scale)


_AROUND = {
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "never forgets an inf, and skips all later steps",
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "keeps overflows from it, so that the scale does not fall",
    ),
}


def _misplacement(node: Any) -> str:
    """What goes wrong where the wrapper stands in a node of a state, if it does."""
    wrong = next((v for kind, v in _AROUND.items() if isinstance(node, kind)), None)
    if wrong and instances(node, DynamicLossScalingState):
        name, consequence = wrong
        return (
            f"{name} around jamp.dynamic_loss_scaling {consequence}: wrap it in "
            "jamp.dynamic_loss_scaling instead"
        )
    if isinstance(node, optax.PartitionState) and _scales_a_part(node):
        return (
            "jamp.dynamic_loss_scaling around a part of optax.partition leaves the "
            "gradients of the others scaled: wrap the whole partition"
        )
    before: list[type] = []
    for part in node if type(node) is tuple else ():
        if instances(part, DynamicLossScalingState):
            break
        before.append(type(part))
    else:
        return ""
    # Not a tuple of the user's own.
    if not before or not all(kind.__module__.startswith("optax.") for kind in before):
        return ""
    names = ", ".join(kind.__name__ for kind in before)
    return (
        "if this is the state of an optax.chain, what stands in it before "
        f"jamp.dynamic_loss_scaling ({names}) sees scaled gradients, and a clip leaves "
        "next to nothing of them: wrap the whole chain"
    )


def _scales_a_part(state: optax.PartitionState) -> bool:
    """Whether some optimizers of a partition unscale gradients, and others do not."""
    parts = [getattr(s, "inner_state", s) for s in state.inner_states.values()]
    # What has no state, such as optax.set_to_zero, may be there to freeze.
    scaled = [bool(instances(p, DynamicLossScalingState)) for p in parts if p != ()]
    return any(scaled) and not all(scaled)


def _left_out(tree: Any) -> str:
    """What goes wrong where only a mask stands around the wrapper, if it does.

    What it leaves out is known of optimizers whose states are trees of parameters.
    """
    masked = instances(tree, optax.MaskedState)
    scaled = [instances(node, DynamicLossScalingState) for node in masked]
    # Not what masks inside of the wrapper leave out.
    inner = [state.inner_state for state in itertools.chain(*scaled)]
    own = instances(inner, (optax.MaskedNode, optax.MaskedState, optax.PartitionState))
    left_out = any(isinstance(node, optax.MaskedNode) for node in own)
    if not all(scaled) or not left_out:
        return ""
    return (
        "optax.masked around jamp.dynamic_loss_scaling hands on the gradients that it "
        "leaves out as they came, scaled: wrap the masked optimizer instead, or set "
        "the others to zero, as optax.masked(optax.set_to_zero(), others) does"
    )


def find_state(tree: Any, hint: str = "") -> Any:
    """The state of loss scaling in a tree; an error, which ends in a hint, if none."""
    found = instances(tree, (DynamicLossScalingState, ScalerState))
    if len(found) == 1:
        nodes = jax.tree.leaves(tree, is_leaf=lambda node: bool(_misplacement(node)))
        for message in filter(None, [*map(_misplacement, nodes), _left_out(tree)]):
            warnings.warn(message, JampWarning, stacklevel=users_level())
        return found[0]
    if found:
        raise ScalerError(
            f"found {len(found)} loss scales in {type(tree).__name__}, and a loss has "
            "one: wrap the whole optimizer in jamp.dynamic_loss_scaling, not its parts;"
            " of several optimizers give the state of the one that the loss is for"
        )
    # Whatever JAX calls an array while it traces.
    kind = "an array" if isinstance(tree, jax.Array) else type(tree).__name__
    if isinstance(tree, dict):
        hint += f"; {RESTORE}"
    if isinstance(tree, optax.GradientTransformation):
        hint = "; that of an optimizer tx is tx.init(params)"
    if isinstance(tree, GradScaler):
        hint = "; that of a scaler is scaler.init()"
    raise ScalerError(
        f"found no loss scale in {kind}: give it the state of an optimizer made by "
        "jamp.dynamic_loss_scaling, as tx = jamp.dynamic_loss_scaling(tx), or a "
        f"ScalerState{hint}"
    )
