"""Arguments of loss scaling: what is checked of them, and what is found in them.

Numbers, flags, trees of both and names of axes are checked; optimizers are found in
what makes them, and states in trees.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._equations.content import is_key
from jamp._errors import ScalerError, ScalerTypeError, described
from jamp._loss_scaling.scaler_state import ScalerState

LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
LARGEST_COUNT = int(np.iinfo(np.int32).max)
# Those of a state dict, which are torch's.
SAVED_KEYS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)


def expect(fine: bool, value: Any, message: str) -> None:
    """Raises if a value is not fine, with a message that ends in what it is instead."""
    if not fine:
        raise ScalerTypeError(f"{message} got {type(value).__name__}")


def without_multi_steps(tx: Any) -> Any:
    """An optimizer; of an `optax.MultiSteps`, which is none, the one that it makes."""
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


def saved_numbers(saved: Any, negative: bool) -> list[float]:
    """The numbers of a state dict; whether torch's negative ones too."""
    if not isinstance(saved, Mapping):
        raise ScalerTypeError(
            "load_state_dict takes the dict that state_dict of jamp or torch gave, got "
            f"{described(saved)}"
        )
    if not saved:
        raise ScalerError(
            "The source state dict is empty, possibly because it was saved from a "
            "disabled instance of GradScaler, which enabled=False makes again"
        )
    missing = [key for key in SAVED_KEYS if key not in saved]
    if missing:
        raise ScalerError(
            f"the state dict lacks {', '.join(map(repr, missing))}; a GradScaler's "
            f"has {', '.join(map(repr, SAVED_KEYS))}"
        )
    numbers = []
    for key in SAVED_KEYS:
        try:
            number = float(saved[key])
        except (TypeError, ValueError, OverflowError) as error:
            raise ScalerTypeError(
                f"{key!r} of the state dict must be a number, got {saved[key]!r}"
            ) from error
        if key in ("growth_interval", "_growth_tracker"):
            fits = 0 <= number <= LARGEST_COUNT and number.is_integer()
        else:
            fits = negative or not number < 0
        if not fits:
            raise ScalerError(
                f"{key!r} of the state dict is out of range: {saved[key]!r}"
            )
        numbers.append(number)
    return numbers


def mapped_axes(axis_name: Any) -> Any:
    """Names of mapped axes, if they are such that JAX can reduce over them."""
    if axis_name is None:
        return None
    axes = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    names = axes if isinstance(axes, tuple) else (axes,)
    # JAX takes an int for the position of an axis.
    named = all(is_key(name) and not isinstance(name, int) for name in names)
    if not named or len({*names}) < len(names):
        raise ScalerTypeError(
            "axis_name must be a hashable name, and no int, that jax.shard_map, "
            "jax.pmap or jax.vmap gives an axis, or a tuple of such names, each once; "
            f"got {described(axis_name)}"
        )
    return axes


def new_scale_of(old: jax.Array, value: Any) -> jax.Array:
    """A scale to set, or the old one where an array on a device holds none."""
    is_real = is_number(value) and not np.iscomplexobj(value)
    if not is_real or jnp.result_type(value) == np.bool_:
        raise ScalerTypeError(f"new_scale must be a number, got {described(value)}")
    if np.ndim(value):
        raise ScalerError(f"new_scale must be a scalar, got an array of {value.shape}")
    if isinstance(value, jax.Array):
        array = value.astype(jnp.float32)
        return jnp.where((array > 0) & jnp.isfinite(array), array, old)
    if not (0 < value <= LARGEST and np.float32(value) > 0):
        raise ScalerError(
            f"new_scale must be positive and finite in float32, got {value}"
        )
    return jnp.asarray(value, jnp.float32)


def any_of(found_inf: Any, method: str) -> jax.Array:
    """Whether one of the flags that a method of a scaler got is set."""
    message = "found_inf must be what unscale returned,"
    expect(not instances(found_inf, ScalerState), found_inf, message)
    flags = jax.tree.leaves(found_inf)
    if not flags:
        raise ScalerError(
            f"No inf checks were recorded prior to {method}: give it the found_inf "
            "that unscale returned" + (", or a new_scale" if method == "update" else "")
        )
    for flag in flags:
        other = "a scale to set is new_scale=...; " if method == "update" else ""
        is_flag = is_number(flag) and not _is_scale_or_gradient(flag)
        expect(is_flag, flag, f"{other}{message}")
    return jnp.stack([jnp.asarray(flag, bool).any() for flag in flags]).any()


def refuse_stack(scale: jax.Array) -> None:
    """Raises for the scales of several states in one array."""
    if shape := jnp.shape(scale):
        raise ScalerError(
            f"the state holds a stack of loss scales, of shape {shape}, as that of "
            "several devices or models does: call this inside the jax.pmap or jax.vmap "
            "over them, or give it one of the states"
        )


def _is_scale_or_gradient(number: Any) -> bool:
    """Whether a number is no flag; torch's flags are floats too, as 1.0.

    Integers in arrays may be sums of flags.
    """
    if isinstance(number, int | float):
        return number not in (0, 1)
    if not jnp.issubdtype(jnp.result_type(number), np.inexact):
        return False
    traced = isinstance(number, jax.core.Tracer)
    return np.ndim(number) > 0 or not (traced or float(number.real) in (0, 1))


def is_number(leaf: Any) -> bool:
    """Whether a value is an array or number that can be scaled."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
        return False
    dtype = getattr(leaf, "dtype", np.dtype(type(leaf)))
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def differences(grads: Any, params: Any) -> str:
    """What gradients have and parameters lack, or the reverse, in words.

    Only floating arrays have gradients.
    """
    held = {
        name: {
            f"{np.shape(leaf)} at {keystr(path) or 'the top'}"
            for path, leaf in tree_leaves_with_path(tree)
            if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact)
        }
        for name, tree in (("gradients", grads), ("parameters", params))
    }
    both = set.intersection(*held.values())
    return " and ".join(
        f"only {name} have {', '.join(sorted(own - both)[:3])}"
        for name, own in held.items()
        if own - both
    )


def _paths_of(dtype: Any, tree: Any) -> list[Any]:
    """Where the leaves of a dtype are in a tree."""
    leaves = tree_leaves_with_path(tree)
    return [path for path, leaf in leaves if getattr(leaf, "dtype", None) == dtype]


def refuse_float16(tree: Any, what: str) -> None:
    """Raises if a tree, which the message calls `what`, has float16 leaves."""
    paths = [keystr(path) for path in _paths_of(jnp.float16, tree)]
    if paths:
        shown = ", ".join(paths[:5]) + (" ..." if len(paths) > 5 else "")
        # A tree that is one array has no path.
        raise ScalerError(
            f"{what}{shown and ' at ' + shown} are float16: keep the parameters in "
            "float32 and let jamp.autocast cast them where they are used. If they are "
            "not trained, scale the loss for the others alone: optax.partition({'train'"
            ": jamp.dynamic_loss_scaling(tx), 'freeze': optax.set_to_zero()}, labels)"
        )


def refuse_narrowed(grads: Any, params: Any) -> None:
    """Raises for float16 gradients of float32 parameters."""
    narrow = _paths_of(jnp.float16, grads)
    if narrow and not set(narrow).isdisjoint(_paths_of(jnp.float32, params)):
        raise ScalerError(
            "the gradients are float16 and the parameters float32, as where autocast "
            "is around the gradient: differentiate what it returns, "
            "jamp.value_and_grad(jamp.autocast(loss_fn))"
        )


def holds_functions(extra_args: dict[str, Any]) -> bool:
    """Whether an optimizer is given functions, which it may differentiate by itself."""
    return any(map(callable, jax.tree.leaves(extra_args, is_leaf=callable)))


def instances(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """The nodes of a tree, outermost only, that are of certain classes."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]
