"""Matmuls and convolutions of operands in other dtypes than they were traced in."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._lowerings.lowering import Lowering, with_params
from jamp._lowerings.processor import multiplies_bfloat16


def lower_product(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """What is bound for a matmul or convolution, in its operands' dtype."""
    dtype = _dtypes.widest(aval.dtype for aval in avals[:2])
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
    return with_params(eqn, **params)
