"""Matmuls and convolutions: what the user wrote about precision, and accumulation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._dtypes import DType
from jamp._processor import multiplies_bfloat16

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


def product_params(eqn: JaxprEqn, dtype: DType, device_type: str) -> dict[str, Any]:
    """Parameters of a product whose operands were cast.

    Args:
      eqn: the matmul or convolution.
      dtype: the dtype of its operands, and of its result.
      device_type: for which kind of device.
    """
    params: dict[str, Any] = {"preferred_element_type": dtype}
    if dtype in _dtypes.LOW_DTYPES and eqn.params.get("precision") is not None:
        # A configured one is for float32; its transposes would take it again for None.
        params["precision"] = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
    slow = (
        dtype in _dtypes.LOW_DTYPES
        and device_type == "cpu" == jax.default_backend()
        and multiplies_bfloat16() is False
        # XLA would send float32 copies of sharded operands from device to device.
        and jax.device_count() == 1
    )
    if slow and eqn.primitive.name == "dot_general":
        # 16-bit operands and results, multiplied and summed in float32: the same
        # product, without a loop that takes its operands apart one by one.
        params["precision"] = jax.lax.DotAlgorithmPreset.F32_F32_F32
    return params
