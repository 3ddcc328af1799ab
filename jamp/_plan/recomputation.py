"""What runs in float32 as traced, and what of it the backward pass may run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._dtypes import FLOAT32


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
    return not holds(eqns, lambda name: name not in primitives.CHEAP)


def holds(eqns: Sequence[JaxprEqn], test: Callable[[str], bool]) -> bool:
    """Whether a primitive of some equations, or inside of one, passes a test."""
    return any(
        test(eqn.primitive.name)
        or any(holds(inner.eqns, test) for inner in jaxprs_in_params(eqn.params))
        for eqn in eqns
    )
