"""Segments of a program that run as traced: equal ones are one function for JAX.

A call of LayerNorm or softmax that runs in float32 throughout is the same few equations
in every layer. Handed to JAX as one jitted function that it inlines, they are
differentiated once and found in its caches afterwards, as they are in the program as
written. The result is the same equations.

A segment that 16-bit arrays enter keeps those for the backward pass, which computes the
float32 inside anew, instead of several float32 arrays: less memory, and less to read.
What leaves it in 16 bits is cast inside of it, so that its gradient enters in 16 bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.extend.source_info_util import current_name_stack, user_context

from jamp import _dtypes
from jamp._compat import INLINE, settings, under_trace
from jamp._dtypes import FLOAT32, DType
from jamp._emit import bind
from jamp._plan import primitives

_LIMIT = 1024
_functions: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()


def runs_in_float32(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether all that autocast could cast in some equations is float32 as traced."""
    return all(
        dtype == FLOAT32 or not _castable(dtype)
        for eqn in eqns
        for dtype in map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars))
    ) and all(
        runs_in_float32(inner.eqns)
        for eqn in eqns
        for inner in jaxprs_in_params(eqn.params)
    )


def _castable(dtype: Any) -> bool:
    return dtype is not None and (_dtypes.eligible(dtype) or _dtypes.is_float64(dtype))


def recomputable(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equations are cheap enough for the backward pass to run again."""
    return not _holds(eqns, lambda name: name not in primitives.CHEAP)


def _holds(eqns: Sequence[JaxprEqn], test: Callable[[str], bool]) -> bool:
    """Whether a primitive of some equations, or inside of one, passes a test."""
    return any(
        test(eqn.primitive.name)
        or any(_holds(inner.eqns, test) for inner in jaxprs_in_params(eqn.params))
        for eqn in eqns
    )


def run_segment(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    arrays: Sequence[Any],
    narrow: Sequence[DType | None],
    device_type: str,
) -> tuple[list[Any], list[Any]]:
    """Runs equations in the float32 that they were traced in.

    Args:
      eqns: the equations, all in the same named scopes.
      invars: the variables that they read and do not make.
      outvars: those of their results that are wanted.
      arrays: arrays for `invars`. If some are of 16 bits, the backward pass runs the
        equations again.
      narrow: for each of `outvars` the dtype in which it is wanted as well, or None.
      device_type: what the program is for.

    Returns:
      Arrays for `outvars`, and those in the dtypes of `narrow`, or None.
    """
    run = _narrowing(_runner(eqns, invars, outvars), narrow)
    low = [getattr(array, "dtype", None) in _dtypes.LOW_DTYPES for array in arrays]
    if any(low):
        run = _recomputing(run, low, eqns, device_type)
    if not under_trace(arrays):
        return run(*arrays)
    key = _key(eqns, invars, outvars, (*low, *narrow, device_type))
    if key is None:
        return run(*arrays)
    if key not in _functions:
        _functions[key] = jax.jit(run, inline=INLINE)
        if len(_functions) > _LIMIT:
            _functions.popitem(last=False)
    _functions.move_to_end(key)
    wide, narrowed = _functions[key](*arrays)
    return wide, narrowed


def _runner(
    eqns: Sequence[JaxprEqn], invars: Sequence[Any], outvars: Sequence[Any]
) -> Callable[..., list[Any]]:
    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(invars, arrays, strict=True))
        name_stack = current_name_stack()
        for eqn in eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            with (
                user_context(eqn.source_info.traceback, name_stack=name_stack),
                settings(eqn),
            ):
                results = bind(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[var] for var in outvars]

    return run


def _reduces(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether a result is worth saving: it is small and takes a pass to compute."""
    del operands, params
    return str(primitive) in primitives.REDUCTIONS


def _narrowing(
    run: Callable[..., list[Any]], narrow: Sequence[DType | None]
) -> Callable[..., tuple[list[Any], list[Any]]]:
    def run_and_narrow(*arrays: Any) -> tuple[list[Any], list[Any]]:
        results = run(*arrays)
        return results, [
            None if dtype is None else jax.lax.convert_element_type(result, dtype)
            for result, dtype in zip(results, narrow, strict=True)
        ]

    return run_and_narrow


def _recomputing(
    run: Callable[..., Any],
    low: Sequence[bool],
    eqns: Sequence[JaxprEqn],
    device_type: str,
) -> Callable[..., Any]:
    """A segment that the backward pass runs again, from arrays some of which are low.

    Barriers keep XLA from sharing it with the forward pass, and from fusing it with
    what is around. On GPUs, unlike CPUs, it computes cheap functions again without.
    """
    costly = _holds(eqns, primitives.TRANSCENDENTAL.__contains__)
    round_gradient = costly and not _holds(eqns, _reduces)
    barred = costly or device_type == "cpu"

    def widened(array: Any) -> Any:
        array = _with_rounded_gradient(array) if round_gradient else array
        return jax.lax.convert_element_type(array, FLOAT32)

    def widen_and_run(*arrays: Any) -> Any:
        return run(
            *(
                widened(array) if is_low else array
                for array, is_low in zip(arrays, low, strict=True)
            )
        )

    return jax.checkpoint(widen_and_run, policy=_reduces, prevent_cse=barred)


@jax.custom_jvp
def _with_rounded_gradient(array: Any) -> Any:
    """The array itself; XLA has to round its gradient.

    Otherwise it keeps the float32 that the gradient is rounded from for who sums it, as
    the gradient of a bias does, and writes and reads it beside the 16 bits.
    """
    return array


@_with_rounded_gradient.defjvp
def _rounded_gradient_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], jax.lax.optimization_barrier(tangents[0])


def _key(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    settings: Hashable,
) -> Hashable:
    """What two equal segments have in common; None if it cannot be told."""
    numbers = {var: number for number, var in enumerate(invars)}
    parts: list[Hashable] = [tuple(var.aval for var in invars), settings]
    for eqn in eqns:
        if eqn.primitive.name.startswith("custom_"):
            return None  # its derivative rule is another object in every trace
        operands = tuple(
            (v.aval, np.asarray(v.val).tobytes())
            if isinstance(v, Literal)
            else numbers[v]
            for v in eqn.invars
        )
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        params = tuple(eqn.params.items())
        parts.append((eqn.primitive, params, operands, eqn.ctx))
    key = (tuple(parts), tuple(numbers[var] for var in outvars))
    try:
        hash(key)
    except TypeError:
        return None
    return key
