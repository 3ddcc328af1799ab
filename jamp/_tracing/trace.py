"""Traces a function on the arrays among its arguments."""

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import jax

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._compat import trace_of
from jamp._equations import constants, equations
from jamp._tracing.casts import make_jaxpr
from jamp._tracing.checks import is_array, refuse_made
from jamp._tracing.functions import in_functions, widening
from jamp._tracing.regions import Options


class Traced(NamedTuple):
    program: Any  # a closed jaxpr
    rebuild: Callable[[Sequence[Any]], Any]  # the function's result
    # Whether an equal call would be traced the same. Arrays that it closes over may be
    # others then, as the parameters of a module are after an update.
    repeatable: bool


_finished: WeakSet[Any] = WeakSet()


def outlived(value: Any) -> bool:
    """Whether a value stems from a trace of a function that is finished."""
    return isinstance(value, jax.core.Tracer) and trace_of(value) in _finished


def with_arrays(
    leaves: Sequence[Any], positions: Sequence[int], arrays: Sequence[Any]
) -> list[Any]:
    found = dict(zip(positions, arrays, strict=True))
    return [found.get(index, leaf) for index, leaf in enumerate(leaves)]


def pass_for(fn: Callable[..., Any], stand_in: Any) -> None:
    """Lets JAX name a function, and its line, in errors about its stand-in."""
    signature = inspect.signature(stand_in)
    named = fn if hasattr(fn, "__name__") else type(fn).__call__
    functools.update_wrapper(stand_in, named, updated=())
    stand_in.__signature__ = signature


def trace(fn: Callable[..., Any], options: Options, args: Any, kwargs: Any) -> Traced:
    leaves, tree = jax.tree.flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    out: dict[str, Any] = {}

    def flat(arrays: list[Any]) -> list[Any]:
        filled = with_arrays(leaves, positions, arrays)
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        try:
            result = fn(*inner_args, **inner_kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            # Before JAX takes its own frames out of the traceback.
            out["refused"] = _raised_by_jax(error)
            raise
        refuse_made(result, leaves)
        found, out["tree"] = jax.tree.flatten(result)
        # Arrays are tracers here, which must not outlive the trace.
        out["static"] = [None if is_array(leaf) else (leaf,) for leaf in found]
        pairs = zip(found, in_functions(result), strict=True)
        out["kept"] = [keeps for leaf, keeps in pairs if is_array(leaf)]
        _finished.update(map(trace_of, arrays[:1]))
        return [leaf for leaf in found if is_array(leaf)]

    pass_for(fn, flat)
    arrays = [leaves[position] for position in positions]
    program = _as_written(make_jaxpr(flat, options), arrays, out)
    static, out_tree, kept = out["static"], out["tree"], out["kept"]

    def rebuild(results: Sequence[Any]) -> Any:
        dtypes = [aval.dtype for aval in program.out_avals]
        arrays = (
            array.astype(dtype) if keeps and array.dtype != dtype else array
            for array, dtype, keeps in zip(results, dtypes, kept, strict=True)
        )
        result = jax.tree.unflatten(
            out_tree, [next(arrays) if s is None else s[0] for s in static]
        )
        return widening(result) if any(kept) else result

    repeatable = not any(isinstance(found, jax.Array) for found in constants(program))
    return Traced(program, rebuild, repeatable)


def _as_written(
    traced: Callable[[list[Any]], Any], arrays: list[Any], out: dict[str, Any]
) -> Any:
    """Traces as written; as if in float32 where 16-bit arguments cannot be traced."""
    avals = [jax.typeof(array) for array in arrays]
    narrow = [_dtypes.narrow(aval.dtype) for aval in avals]
    widened = [
        aval.update(dtype=_dtypes.FLOAT32) if short else aval
        for aval, short in zip(avals, narrow, strict=True)
    ]
    try:
        program = traced(arrays)
    except Exception as error:
        if not any(narrow) or not out.get("refused"):
            raise
        try:
            return traced(widened)
        except Exception:  # noqa: BLE001 - what is wrong in the dtypes as given tells
            raise error from error.__cause__
    if any(narrow) and _refuses_16_bits(program):
        return traced(widened)
    return program


def _raised_by_jax(error: Exception) -> bool:
    """Whether JAX itself raised an error, and not a function that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("jax.")


def _refuses_16_bits(program: Any) -> bool:
    return any(
        _dtypes.narrow(_dtypes.dtype_of(var))
        for eqn in equations(program)
        if eqn.primitive.name in primitives.FLOAT32_ONLY
        for var in eqn.invars
    )
