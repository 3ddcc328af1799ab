"""Whether the user asked for the precision of a matmul or convolution."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._equations import nested

_DEFAULT = (None, jax.lax.Precision.DEFAULT)


def explicit_precision(eqn: JaxprEqn) -> bool:
    """Whether the user asked for a precision: then it stays as traced.

    That is a precision above the default, an algorithm, or a result wider than 16-bit
    operands. What `jax_default_matmul_precision` gives to all products is not asked
    for, and the same precision written at a call cannot be told from it.
    """
    precision: Any = eqn.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in _DEFAULT for p in given) and precision != _configured():
        return True
    traced = [_dtypes.dtype_of(var) for var in eqn.invars[:2]]
    preferred = eqn.params.get("preferred_element_type")
    if preferred is None or not all(map(_dtypes.eligible, traced)):
        return False
    # Two 16-bit types meet at float32 by JAX's promotion, which nobody asked for.
    return bool(np.dtype(preferred).itemsize > _dtypes.widest(traced).itemsize)


def _configured() -> Any:
    """What JAX makes of the precision that its configuration gives to all products."""
    config: Any = jax.config
    name = config.jax_default_matmul_precision
    if name is None:
        return None
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    return (jax.lax.Precision(name), jax.lax.Precision(name))


def holds_explicit_precision(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether the user asked for one in some equations, or inside of them."""
    names = primitives.MATMULS
    return any(explicit_precision(e) for e in nested(eqns) if e.primitive.name in names)
