"""`custom_fwd` and `custom_bwd`: functions that choose their own dtypes."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from jamp import _dtypes
from jamp._autocast import is_autocast_enabled
from jamp._errors import AutocastTypeError
from jamp._tracing import regions
from jamp._tracing.checks import check_function, is_array
from jamp._tracing.nnx_modules import is_stateful
from jamp._tracing.options import check_floating, device_kind
from jamp._tracing.trace import name_of, wraps

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def custom_fwd(
    fn: Callable[_P, _R], *, device_type: str | None = None, cast_inputs: Any = None
) -> Callable[_P, _R]: ...


@overload
def custom_fwd(
    fn: None = None, *, device_type: str | None = None, cast_inputs: Any = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def custom_fwd(
    fn: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: Any = None,
) -> Any:
    """Gives a function the dtypes of its own that it needs under autocast.

    For the function and the forward rule of a `jax.custom_vjp`, and for any other
    function. Without `cast_inputs` it runs under the autocast in force, as every
    function does. With it, under an enabled autocast, floating arrays among the
    arguments (anywhere in their pytrees, but not in `flax.nnx` modules) are cast and
    the function runs as written; it returns what it computed. Outside an enabled
    autocast nothing changes.

        @jax.custom_vjp
        @jamp.custom_fwd(cast_inputs=jnp.float32)
        def f(x): ...

        @jamp.custom_fwd(cast_inputs=jnp.float32)
        def f_fwd(x): ...

        @jamp.custom_bwd(cast_inputs=jnp.float32)
        def f_bwd(residuals, g): ...

        f.defvjp(f_fwd, f_bwd)

    Args:
      fn: the function. Left out, the call returns a decorator.
      device_type: `'gpu'` (`'cuda'`, `'rocm'`), `'cpu'` or `'tpu'`: cast under an
        autocast for that one only; by default under any.
      cast_inputs: floating dtype for the arguments; float64 arrays keep theirs.

    Returns:
      The function, or a decorator.

    Raises:
      AutocastError: an unknown device type.
      AutocastTypeError: `fn` is not callable, or `cast_inputs` is no floating dtype.
    """
    dtype = _checked(device_type, cast_inputs)
    if fn is None:
        return functools.partial(
            custom_fwd, device_type=device_type, cast_inputs=cast_inputs
        )
    check_function("custom_fwd", fn)
    _refuse_without_rules("custom_fwd", fn)
    return _with_own_dtypes(fn, device_type, dtype)


@overload
def custom_bwd(
    fn: Callable[_P, _R], *, device_type: str | None = None, cast_inputs: Any = None
) -> Callable[_P, _R]: ...


@overload
def custom_bwd(
    fn: None = None, *, device_type: str | None = None, cast_inputs: Any = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def custom_bwd(
    fn: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: Any = None,
) -> Any:
    """Gives the backward rule of a `jax.custom_vjp` the dtypes of its forward rule.

    A backward rule runs under the autocast that its function was called in, wherever
    the gradient is taken. With this around it, it runs as written where a `custom_fwd`
    with `cast_inputs` has its forward rule run so. Given the `cast_inputs` too, it gets
    residuals and cotangents in that dtype, and runs as written also where the gradient
    is taken inside of the function under autocast, as in `jamp.autocast(jax.grad(f))`,
    which does not know the forward rule. Gradients reach each argument in the
    argument's own dtype.

    Args:
      fn: the rule, a function of residuals and cotangents. Left out, the call returns a
        decorator.
      device_type: as for `custom_fwd`.
      cast_inputs: as for `custom_fwd`.

    Returns:
      The rule, or a decorator.

    Raises:
      AutocastError: an unknown device type.
      AutocastTypeError: `fn` is not callable, or `cast_inputs` is no floating dtype.
    """
    _checked(device_type, cast_inputs)
    if fn is None:
        return functools.partial(
            custom_bwd, device_type=device_type, cast_inputs=cast_inputs
        )
    check_function("custom_bwd", fn)
    _refuse_without_rules("custom_bwd", fn)
    if cast_inputs is not None:
        return custom_fwd(fn, device_type=device_type, cast_inputs=cast_inputs)

    @wraps(fn)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        with regions.as_forward():
            return fn(*args, **kwargs)

    return as_forward


def _with_own_dtypes(
    fn: Callable[..., Any], device_type: str | None, dtype: _dtypes.DType | None
) -> Callable[..., Any]:
    source = f"cast_inputs={dtype} of {name_of(fn) or 'a function'}"

    def reason() -> str:
        return source if is_autocast_enabled(device_type) else ""

    @wraps(fn)
    def with_own_dtypes(*args: Any, **kwargs: Any) -> Any:
        if dtype is None or not reason():
            return fn(*args, **kwargs)
        with regions.as_written(source):
            cast = functools.partial(_cast, dtype=dtype)
            args, kwargs = jax.tree.map(cast, (args, kwargs), is_leaf=is_stateful)
            return fn(*args, **kwargs)

    if dtype is not None:
        setattr(with_own_dtypes, regions.REASON, reason)
    return with_own_dtypes


def _checked(device_type: str | None, cast_inputs: Any) -> _dtypes.DType | None:
    """The dtype for arguments, if there is one, of options that are right."""
    if device_type is not None:
        device_kind(device_type)
    return None if cast_inputs is None else check_floating("cast_inputs", cast_inputs)


def _refuse_without_rules(name: str, fn: Any) -> None:
    if isinstance(fn, jax.custom_vjp) and fn.bwd is None:
        raise AutocastTypeError(
            f"{name} takes a function or a rule, got a jax.custom_vjp that has no "
            "rules yet, whose defvjp it would hide: put @jax.custom_vjp above "
            f"@jamp.{name}"
        )


def _cast(leaf: Any, dtype: _dtypes.DType) -> Any:
    if is_stateful(leaf) or not is_array(leaf) or not _dtypes.eligible(leaf.dtype):
        return leaf
    return jax.numpy.asarray(leaf, dtype)
