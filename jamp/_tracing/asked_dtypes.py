"""Which code asks JAX for a dtype that an array has already, so that JAX does nothing.

It does so by a cast, or by the `dtype` of a sum and its like.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import jax

from jamp._compat import around_calls, around_casts

See = Callable[[Any, str], Any]

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
# What stands between a cast in a program and JAX's function of it.
_CASTING = frozenset(
    "<listcomp> __call__ _astype _concatenate_array _cumulative_reduction array "
    "asarray astype concatenate convert_element_type cumulative_prod dstack hstack "
    "meth stack vstack".split()
)


@contextmanager
def seeing_casts(see: See) -> Iterator[None]:
    """While a program is traced, has JAX take what `see` makes of what is cast.

    Args:
      see: called, in any thread, with a traced array that has the dtype already, and
        the file of the code that asks for it.
    """
    with around_casts(partial(_showing, see)), around_calls(partial(_entering, see)):
        yield


def _showing(see: See, convert: Any) -> Any:
    def shown(operand: Any, *args: Any, **kwargs: Any) -> Any:
        result = convert(operand, *args, **kwargs)
        if result is operand and isinstance(operand, jax.core.Tracer):
            caster = _caster(sys._getframe(1))
            if caster is not None:
                return see(operand, caster.f_code.co_filename)
        return result

    return shown


def _caster(frame: FrameType | None) -> FrameType | None:
    """The frame of the code that asks for a cast to a dtype which it names, if any."""
    asked = None
    while frame and _is_jaxs(frame.f_code) and frame.f_code.co_name in _CASTING:
        asked, frame = frame, frame.f_back
    given = asked.f_locals if asked else {"dtype": None}
    if given.get("dtype", asked) is None or given.get("ndmin"):
        return None
    # What becomes of a list has the dtype that its elements have.
    return None if isinstance(given.get("object"), list | tuple) else frame


def _entering(see: See, infer: Any) -> Any:
    def entered(fn: Any, info: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if _takes_dtype(fn):
            args, kwargs = _entered(see, fn, args, kwargs)
        return infer(fn, info, args, kwargs)

    return entered


def _takes_dtype(fn: Any) -> bool:
    """Whether a function is JAX's, of an array first, and of a `dtype`."""
    if not isinstance(fn, FunctionType) or not _is_jaxs(fn.__code__):
        return False
    count = fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount
    return "dtype" in fn.__code__.co_varnames[:count]


# Of functions of JAX's, which are called again and again.
_signature = lru_cache(maxsize=1024)(inspect.signature)


def _entered(
    see: See, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of such a function; its array, if it is asked for its own dtype."""
    try:
        given = _signature(fn).bind(*args, **kwargs).arguments
    except TypeError:
        return args, kwargs  # JAX raises
    name, array = next(iter(given.items()), ("", None))
    dtype = given.get("dtype")
    if dtype is None or not isinstance(array, jax.core.Tracer):
        return args, kwargs
    if jax.dtypes.canonicalize_dtype(dtype) != array.dtype:
        return args, kwargs
    # Where a function of JAX's, such as the mean, calls another, this ends at
    # `entered`, around the outer one: nobody asks then.
    frame: FrameType | None = sys._getframe(2)
    while frame and _is_jaxs(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return args, kwargs
    array = see(array, frame.f_code.co_filename)
    return ((array, *args[1:]), kwargs) if args else (args, {**kwargs, name: array})


def _is_jaxs(code: CodeType) -> bool:
    return code.co_filename.startswith(_JAX)
