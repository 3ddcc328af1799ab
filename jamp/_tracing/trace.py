"""Traces a function on the arrays among its arguments.

Functions that JAX makes while it traces, as pullbacks and linear functions, may be
among the results: pytrees of arrays that run a program on these in the dtypes that it
was made in. So they get the arrays in those dtypes, and what autocast returned in 16
bits, as a cotangent of it is, is widened for them.
"""

import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import jax
import numpy as np
from jax.tree_util import Partial

from jamp import _dtypes, _primitives
from jamp._compat import current_trace, is_made_by_jax, trace_of
from jamp._equations.walks import constants, equations
from jamp._tracing.cache_key import Constant
from jamp._tracing.checks import is_array, may_change, refuse_made
from jamp._tracing.options import Options
from jamp._tracing.users_casts import make_jaxpr

_F = TypeVar("_F", bound=Callable[..., Any])


class Traced(NamedTuple):
    program: Any  # a closed jaxpr
    rebuild: Callable[[Sequence[Any]], Any]  # the function's result
    fresh: bool  # whether each call has to get a result of its own

    @property
    def repeatable(self) -> bool:
        """Whether an equal call would be traced the same.

        Arrays that it closes over may be others then, as the parameters of a module are
        after an update.
        """
        held = constants(self.program)
        return not (self.fresh or any(isinstance(c, jax.Array) for c in held))


_finished: WeakSet[Any] = WeakSet()


def outlived(value: Any) -> bool:
    """Whether a value stems from a trace of a function that is finished."""
    return isinstance(value, jax.core.Tracer) and trace_of(value) in _finished


def with_arrays(
    leaves: Sequence[Any], positions: Sequence[int], arrays: Sequence[Any]
) -> list[Any]:
    found = dict(zip(positions, arrays, strict=True))
    return [found.get(index, leaf) for index, leaf in enumerate(leaves)]


def _positions(leaves: Sequence[Any]) -> list[int]:
    return [position for position, leaf in enumerate(leaves) if is_array(leaf)]


def name_of(fn: Any, default: str | None = None) -> str | None:
    """The name of a function; None of one that is no string.

    That of an equinox module that JAX has put together may be another object.
    """
    name = getattr(fn, "__name__", default)
    return name if isinstance(name, str) else None


def wraps(fn: Any) -> Callable[[_F], _F]:
    """As `functools.wraps`, for callable objects too, whose attributes it leaves.

    A module is full of these.
    """
    named = name_of(fn, default="") is not None
    copied = functools.WRAPPER_ASSIGNMENTS if named else ()

    def wrapping(wrapper: _F) -> _F:
        functools.update_wrapper(wrapper, fn, copied, updated=())
        return wrapper

    return wrapping


def pass_for(fn: Callable[..., Any], stand_in: Any) -> None:
    """Lets JAX name a function, and its line, in errors about its stand-in."""
    signature = inspect.signature(stand_in)
    named = fn if name_of(fn) is not None else type(fn).__call__
    functools.update_wrapper(stand_in, named, updated=())
    stand_in.__signature__ = signature


def trace(fn: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Traced:
    """Traces a function as written, and remembers how to rebuild what it returns."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    positions = _positions(leaves)
    leaves = [leaf.value if isinstance(leaf, Constant) else leaf for leaf in leaves]
    out: dict[str, Any] = {}

    def flat(*args: Any, **kwargs: Any) -> list[Any]:
        arrays = jax.tree.leaves((args, kwargs))
        filled = with_arrays(leaves, positions, arrays)
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        try:
            result = fn(*inner_args, **inner_kwargs)
        except Exception as error:
            # Before JAX takes its own frames out of the traceback.
            by_jax = _raised_by_jax(error)
            out["refused"] = by_jax and isinstance(error, _OF_DTYPES)
            if isinstance(error, _UNKNOWN_YET) or (by_jax and _WORDS in str(error)):
                _say_who_traces(error)
            raise
        refuse_made(result, leaves)
        found, out["tree"] = jax.tree.flatten(result)
        # Arrays are tracers here, which must not outlive the trace.
        out["static"] = [None if is_array(leaf) else leaf for leaf in found]
        out["positions"] = _positions(found)
        pairs = zip(found, in_functions(result), strict=True)
        out["of_functions"] = [inside for leaf, inside in pairs if is_array(leaf)]
        _finished.add(current_trace())
        return [found[position] for position in out["positions"]]

    pass_for(fn, flat)
    with suppress(TypeError, ValueError):
        flat.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    make = make_jaxpr(flat, options)

    def traced(arrays: list[Any]) -> Any:
        # What is no array is no argument for JAX.
        found = with_arrays([None] * len(leaves), positions, arrays)
        args, kwargs = _named(flat, tree, found, arrays)
        return make(*args, **kwargs)

    program = _as_written(traced, [leaves[position] for position in positions], out)

    def rebuild(results: Sequence[Any]) -> Any:
        of_functions, positions = out["of_functions"], out["positions"]
        dtypes = [aval.dtype for aval in program.out_avals]
        arrays = [
            array.astype(dtype) if of_function and array.dtype != dtype else array
            for array, dtype, of_function in zip(
                map(_as_array, results), dtypes, of_functions, strict=True
            )
        ]
        found = with_arrays(out["static"], positions, arrays)
        result = jax.tree.unflatten(out["tree"], found)
        return _widening(result) if any(of_functions) else result

    return Traced(program, rebuild, any(map(may_change, out["static"])))


_OF_ARRAYS = inspect.signature(lambda *arrays: None)


def _named(flat: Any, tree: Any, leaves: list[Any], arrays: list[Any]) -> Any:
    """What to call a function of arrays with: arguments by whose places JAX names them.

    The arrays alone, if a class of the user's takes no None for what is no array.
    """
    with suppress(Exception):  # the class may raise any
        given = jax.tree.unflatten(tree, leaves)
        found = jax.tree.leaves(given)
        if len(found) == len(arrays) and all(map(operator.is_, found, arrays)):
            return given
    flat.__signature__ = _OF_ARRAYS
    return arrays, {}


def _as_array(result: Any) -> Any:
    """A result as a function returns it: of a program it may be a constant's number."""
    if isinstance(result, jax.Array | jax.ShapeDtypeStruct):
        return result
    is_float0 = jax.typeof(result).dtype == jax.dtypes.float0
    return (np if is_float0 else jax.numpy).array(result)


def _as_written(
    traced: Callable[[list[Any]], Any], arrays: list[Any], out: dict[str, Any]
) -> Any:
    """Traces as written; as if in float32 where 16-bit arguments cannot be traced."""
    avals = [jax.typeof(array) for array in arrays]
    widened = [
        aval.update(dtype=_dtypes.FLOAT32)
        if _dtypes.below_float32(aval.dtype)
        else aval
        for aval in avals
    ]
    try:
        program = traced(arrays)
    except Exception as error:
        if widened == avals or not out.get("refused"):
            raise
        try:
            return traced(widened)
        except Exception:  # noqa: BLE001 - what is wrong in the dtypes as given tells
            raise error from error.__cause__
    if widened != avals and _refuses_16_bits(program):
        return traced(widened)
    return program


def _say_who_traces(error: Exception) -> None:
    """Adds what JAX, which speaks of jit, can't know where it refuses Python's control.

    To an error that has been told, nothing.
    """
    instead = (
        "choose between values with jnp.where or jax.lax.cond, or make what decides an "
        "argument that is no array: an int instead of a NumPy integer"
    )
    if isinstance(error, AttributeError):
        instead = "ask for what only a computed array has outside, of its result"
    note = f"jamp.autocast traces the function as jax.jit does: {instead}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# Errors of JAX's that tell that it takes no 16 bits.
_OF_DTYPES = (TypeError, ValueError, NotImplementedError)
_UNKNOWN_YET = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_WORDS = "concrete value"  # in others of JAX's that say the same


def _raised_by_jax(error: Exception) -> bool:
    """Whether JAX itself raised an error, and not a function that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("jax.")


def _refuses_16_bits(program: Any) -> bool:
    return any(
        _dtypes.below_float32(_dtypes.dtype_of(var))
        for eqn in equations(program)
        if eqn.primitive.name in _primitives.FLOAT32_ONLY
        for var in eqn.invars
    )


def _is_function(node: Any) -> bool:
    """Whether something is a function that JAX made, a pytree of what it keeps."""
    if not callable(node) or jax.tree_util.all_leaves([node]):
        return False
    return is_made_by_jax(node)


def in_functions(
    result: Any, is_leaf: Callable[[Any], bool] = lambda node: False
) -> list[bool]:
    """Which leaves of a result belong to functions made while tracing."""
    nodes = jax.tree.leaves(result, lambda node: _is_function(node) or is_leaf(node))
    return [
        _is_function(node) for node in nodes for _ in jax.tree.leaves(node, is_leaf)
    ]


def _widening(result: Any) -> Any:
    """A result whose functions made while tracing also take 16 bits for float32."""
    return jax.tree.map(
        lambda node: Partial(_call, node) if _is_function(node) else node,
        result,
        is_leaf=_is_function,
    )


def _call(function: Any, *args: Any) -> Any:
    with suppress(TypeError, ValueError):
        return function(*args)
    return function(*jax.tree.map(_dtypes.widened, args))
