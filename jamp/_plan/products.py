"""Which products add nothing up, and which have a precision that the user asked for."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._equations.walks import contracted


def adds_nothing(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that adds nothing up."""
    name = eqn.primitive.name
    grouped = eqn.params.get("feature_group_count", 1) > 1
    if name not in _primitives.PRODUCTS or grouped or name == "ragged_dot_general":
        return False
    return all(isinstance(size, int) and size == 1 for size in contracted(eqn))


def explicit_precision(eqn: JaxprEqn) -> bool:
    """Whether the user asked for a precision: then it stays as traced.

    That is a precision above the default, an algorithm, or a result wider than 16-bit
    operands. What `jax_default_matmul_precision` gives to all products is not asked
    for, and the same precision written at a call cannot be told from it.
    """
    precision: Any = eqn.params.get("precision")
    given = {*precision} if isinstance(precision, tuple) else {precision}
    if given - {None, jax.lax.Precision.DEFAULT} and precision != _configured():
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
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    return name and (jax.lax.Precision(name), jax.lax.Precision(name))
