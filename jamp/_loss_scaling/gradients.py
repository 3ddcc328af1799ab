"""`jamp.value_and_grad`: the gradients of a scaled loss."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import api_boundary
from jamp._errors import (
    AutocastTypeError,
    ScalerError,
    ScalerTypeError,
    did_you_mean,
)
from jamp._loss_scaling.arguments import instances, refuse_stack
from jamp._loss_scaling.arithmetic import noting_scaled, scaled
from jamp._loss_scaling.states import find_scale
from jamp._tracing.checks import check_function, is_array, wrong_argnums, wrong_loss
from jamp._tracing.nnx_modules import is_stateful
from jamp._tracing.options import Arguments
from jamp._tracing.trace import wraps

if TYPE_CHECKING:
    from flax import nnx
else:

    class nnx:  # for whoever reads the annotations; Flax need not be installed
        DiffState = Any


_MISSING: Any = object()


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] | nnx.DiffState | Sequence[nnx.DiffState] = 0,
    has_aux: bool = False,
    *inputs: Never,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, of a loss that is scaled for an optimizer.

    With a module of `flax.nnx` among the arguments it is like `nnx.value_and_grad`: the
    gradients are an `nnx.State`, and the module keeps what the loss changes in it. Of
    modules of Equinox, and trees that hold more than arrays and numbers, it is like
    `equinox.filter_value_and_grad`: gradients have None for what is no inexact array.

    Args:
      loss_fn: the loss, a function that returns a scalar.
      argnums: which arguments of `loss_fn` to differentiate at: an integer or several,
        or `nnx.DiffState` for some of a module's variables.
      has_aux: whether `loss_fn` returns a pair of the loss and something else.
      **options: further options of `jax.value_and_grad`.

    Returns:
      A function of `opt_state` (as for `jamp.loss_scale`) and the arguments of
      `loss_fn`: the value, not scaled, and gradients, scaled for `tx.update`.

    Raises:
      ScalerError: `opt_state` has not one loss scale; or the loss is scaled already.
      AutocastTypeError: `loss_fn` is no function, or `argnums` no argument's number.
      ScalerTypeError: the loss is no real scalar, `has_aux` does not fit what `loss_fn`
        returns, or what to differentiate at holds integers.
    """
    numbers = _checked_numbers(loss_fn, argnums, inputs, options)

    @wraps(loss_fn)
    def scaled_value_and_grad(
        opt_state: Any = _MISSING, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        scale = _one_scale(opt_state)

        @wraps(loss_fn)
        def with_scale(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            value, before = noting_scaled(loss_fn, *args, **kwargs)
            loss = _loss_in(value, before, has_aux, options.get("holomorphic", False))
            return scaled(scale, loss), value

        if isinstance(inspect.unwrap(loss_fn), functools.partial):
            # flax.nnx would take the keywords that it has bound for arguments.
            del vars(with_scale)["__wrapped__"]
        transform = _value_and_grad_for(numbers, args, kwargs)
        known = numbers if transform is jax.value_and_grad else ()
        fn, args = _of_arrays(with_scale, args, known, options.get("allow_int", False))
        differentiate = transform(fn, argnums=argnums, has_aux=True, **options)
        (_, value), grads = differentiate(*args, **kwargs)
        return value, grads

    # The signature of the loss lacks the first argument.
    del vars(scaled_value_and_grad)["__wrapped__"]
    with suppress(TypeError, ValueError):
        vars(scaled_value_and_grad)["__signature__"] = _with_state(loss_fn)
    return api_boundary(scaled_value_and_grad)


def _with_state(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of a loss with the optimizer's state in front.

    By it JAX finds the arguments that a jit around it names.
    """
    known = inspect.signature(loss_fn)
    parameters = known.parameters
    name = "opt_state"
    while name in parameters:
        name = f"_{name}"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return known.replace(parameters=[first, *parameters.values()])


def _one_scale(opt_state: Any) -> jax.Array:
    if opt_state is _MISSING:
        raise ScalerTypeError(
            "the state of the optimizer comes first, and by position: "
            "value_and_grad(loss_fn)(opt_state, params, ...)"
        )
    scale = find_scale(opt_state, "; the first argument is opt_state")
    refuse_stack(scale)
    return scale


def _checked_numbers(
    loss_fn: Any, argnums: Any, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """The numbers of arguments, if they are some and a function alone is with them."""
    _check_options(options)
    if isinstance(argnums, np.ndarray) and np.issubdtype(argnums.dtype, np.integer):
        argnums = argnums.tolist()
    numbers: Sequence[Any] = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not all(map(_is_argnum, numbers)):
        if not inputs and isinstance(argnums, str | float | set | None):
            raise wrong_argnums(argnums)
        # The first of the inputs stands where argnums does.
        inputs = (argnums, *inputs)
    check_function("value_and_grad", loss_fn, inputs)
    return numbers


def _check_options(options: dict[str, Any]) -> None:
    """Raises for what is no option of `jax.value_and_grad`, or of flax.nnx's."""
    if not options:
        return
    nnx = sys.modules.get("flax.nnx")
    both = jax.value_and_grad, *([] if nnx is None else [nnx.value_and_grad])
    known = {name for fn in both for name in inspect.signature(fn).parameters}
    unknown = sorted(options.keys() - known)
    if unknown:
        of_autocast = {field.name for field in fields(Arguments)}
        hint = did_you_mean(unknown[0], known)
        if unknown[0] in of_autocast:
            hint = f"; options of autocast go to jamp.autocast(fn, {unknown[0]}=...)"
        raise ScalerTypeError(
            "value_and_grad takes the options of jax.value_and_grad, not "
            f"{', '.join(unknown)}{hint}"
        )


def _of_arrays(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    numbers: Sequence[int],
    allow_int: bool,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and arguments that have None for what is no inexact array.

    In those only that are modules of Equinox, or trees of more than arrays and numbers;
    in others integers raise, unless they are allowed.
    """
    held = {}
    for n in numbers:
        leaves = tree_leaves_with_path(args[n])
        numeric = all(is_array(leaf) or isinstance(leaf, Number) for _, leaf in leaves)
        of_equinox = _has_module_of_equinox(args[n])
        if not numeric or of_equinox:
            if not (of_equinox or any(_is_inexact(leaf) for _, leaf in leaves)):
                raise _without_arrays(n, args[n])
            held[n] = args[n]
            continue
        for path, leaf in () if allow_int else leaves:
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.inexact):
                at = f" at {keystr(path)}" if path else ""
                raise ScalerTypeError(
                    f"argument {n} of the loss{at} is {dtype}, which has no gradient: "
                    "make it floating, or hand it over as another argument"
                )
    if not held:
        return fn, args

    def filled(array: Any, leaf: Any) -> Any:
        return leaf if array is None else array

    @functools.wraps(fn)
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        every = list(args)
        for n, tree in held.items():
            every[n] = jax.tree.map(filled, args[n], tree, is_leaf=lambda a: a is None)
        return fn(*every, **kwargs)

    arrays = list(args)
    for n, tree in held.items():
        arrays[n] = jax.tree.map(lambda a: a if _is_inexact(a) else None, tree)
    return of_arrays, tuple(arrays)


def _without_arrays(n: int, argument: Any) -> ScalerTypeError:
    return ScalerTypeError(
        f"argument {n} of the loss, of type {type(argument).__name__}, holds no "
        "floating arrays to differentiate at: hand over the parameters, as a pytree of "
        "arrays or a module of flax.nnx or Equinox"
    )


def _is_inexact(leaf: Any) -> bool:
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _has_module_of_equinox(tree: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and bool(instances(tree, equinox.Module))


def _loss_in(
    value: Any, scaled_before: Sequence[Any], has_aux: bool, holomorphic: bool
) -> Any:
    wrong = wrong_loss(value, has_aux, holomorphic)
    if wrong:
        raise ScalerTypeError(wrong)
    loss = value[0] if has_aux else value
    if any(loss is array for array in scaled_before):
        raise ScalerError(
            "the loss is scaled already, by jamp.scale_loss or a scaler: "
            "value_and_grad scales it itself, so hand it the loss as it is"
        )
    return loss


def _value_and_grad_for(
    numbers: Sequence[Any], args: Sequence[Any], kwargs: Any
) -> Callable[..., Any]:
    """The `value_and_grad` for arguments: flax.nnx's for what has state, or JAX's.

    JAX's takes a module for a tree of parameters, and loses what a call changes in it.
    Raises for a number that is of no argument.
    """
    for number in numbers:
        # Of an `nnx.DiffState`, that of the module's argument.
        n = getattr(number, "argnum", number)
        if not -len(args) <= n < len(args):
            raise AutocastTypeError(
                f"argnums is {n}, which is none of the {len(args)} that the loss was "
                "given by position: what is given by name has no number"
            )
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return jax.value_and_grad

    def is_leaf(node: Any) -> bool:
        # Of an `nnx.State` a call gets the arrays.
        return isinstance(node, nnx.State) or is_stateful(node)

    found = any(map(is_stateful, jax.tree.leaves((args, kwargs), is_leaf=is_leaf)))
    return nnx.value_and_grad if found else jax.value_and_grad


def _is_argnum(value: Any) -> bool:
    """Whether a value says at which argument to differentiate."""
    nnx = sys.modules.get("flax.nnx")
    return isinstance(value, Integral) or (
        nnx is not None and isinstance(value, nnx.DiffState)
    )
