"""Matmuls and convolutions: what the user wrote about precision, and accumulation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes

_DEFAULT = (None, jax.lax.Precision.DEFAULT)


def explicit_precision(eqn: JaxprEqn) -> bool:
    """Whether the user asked for a precision: then it stays as traced.

    That is a precision above the default, an algorithm, or a result wider than 16-bit
    operands.
    """
    precision: Any = eqn.params.get("precision")
    if isinstance(precision, tuple):
        if any(p not in _DEFAULT for p in precision):
            return True
    elif precision not in _DEFAULT:
        return True
    traced = [_dtypes.dtype_of(var) for var in eqn.invars[:2]]
    preferred = eqn.params.get("preferred_element_type")
    if preferred is None or not all(map(_dtypes.eligible, traced)):
        return False
    # Two 16-bit types meet at float32 by JAX's promotion, which nobody asked for.
    return bool(np.dtype(preferred).itemsize > _dtypes.widest(traced).itemsize)
