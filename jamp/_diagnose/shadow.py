"""One equation in two runs: as it is, and with its 16-bit dtypes widened to float32."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._diagnose.measure import Pair, has_shadow
from jamp._dtypes import FLOAT32
from jamp._equations import bind, bind_primitive, holds_program
from jamp._lowerings.lower import lowering

# XLA may otherwise leave out the roundings that are to be measured.
EXACTLY = {"xla_allow_excess_precision": False}

_HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def run_pair(eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Pair]:
    """Runs an equation without inner programs, or one that cannot be looked into."""
    computed = bind(eqn, [operand.computed for operand in operands])
    shadowed = [has_shadow(var.aval) for var in eqn.outvars]
    if not any(shadowed):
        shadows = [None] * len(computed)
    elif eqn.effects:
        # An equation with effects may run only once.
        shadows = [_widened(array) for array in computed]
    else:
        shadows = _run_wide(eqn, operands)
    return [
        Pair(array, shadow if wanted else None)
        for array, shadow, wanted in zip(computed, shadows, shadowed, strict=True)
    ]


def as_pair(array: Any) -> Pair:
    """A value that enters the program, the same in both runs."""
    return Pair(array, _widened(array) if has_shadow(jax.typeof(array)) else None)


def _widened(array: Any) -> Any:
    dtype = getattr(array, "dtype", None)
    if not _dtypes.narrow(dtype):
        return array
    return jax.lax.convert_element_type(array, FLOAT32)


def _run_wide(eqn: JaxprEqn, operands: Sequence[Pair]) -> list[Any]:
    """The results of an equation in the run in float32."""
    name, arrays = eqn.primitive.name, [operand.wide for operand in operands]
    if name == "reduce_precision":
        # It only rounds, as a cast to 16 bits would.
        return arrays
    dtypes = map(_dtypes.dtype_of, (*eqn.invars, *eqn.outvars))
    if not any(map(_dtypes.narrow, dtypes)):
        return bind(eqn, arrays)
    if name in primitives.SCATTERS:
        primitive, params = lowering(eqn, list(map(jax.typeof, arrays)), "cpu")
        return bind_primitive(primitive, params, arrays)
    if _is_opaque(eqn):
        narrowed = [
            array if array is None else _like(array, operand.computed)
            for array, operand in zip(arrays, operands, strict=True)
        ]
        return [_widened(array) for array in bind(eqn, narrowed)]
    return bind(eqn, arrays, **_wide_params(eqn))


def _is_opaque(eqn: JaxprEqn) -> bool:
    """Whether an equation runs only in the dtypes that it stands in."""
    return eqn.primitive.name in primitives.DTYPE_BOUND or holds_program(eqn)


def _like(array: Any, other: Any) -> Any:
    dtype = other.dtype
    return array if array.dtype == dtype else jax.lax.convert_element_type(array, dtype)


def _wide_params(eqn: JaxprEqn) -> dict[str, Any]:
    params: dict[str, Any] = {
        name: FLOAT32
        for name, value in eqn.params.items()
        if name.endswith(("dtype", "element_type"))
        and value is not None
        and _dtypes.narrow(np.dtype(value))
    }
    if eqn.primitive.name in primitives.MATMULS:
        params["precision"] = _HIGHEST
    return params
