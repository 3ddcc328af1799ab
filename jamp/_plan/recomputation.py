"""What runs in float32 as traced, and what of it the backward pass may run again."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._dtypes import FLOAT32
from jamp._equations import nested


def runs_in_float32(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether all that autocast could cast in some equations is float32 as traced."""
    return all(
        dtype == FLOAT32 or not _castable(dtype)
        for eqn in nested(eqns)
        for dtype in map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars))
    )


def _castable(dtype: Any) -> bool:
    return dtype is not None and (_dtypes.eligible(dtype) or _dtypes.is_float64(dtype))


def recomputable(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equations are cheap enough for the backward pass to run again."""
    return all(eqn.primitive.name in primitives.CHEAP for eqn in nested(eqns))
