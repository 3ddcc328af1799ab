"""The hook between a plan and JAX: which primitive is bound for an equation."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Primitive

from jamp import _dtypes, _primitives
from jamp._lowerings.processor import multiplies_bfloat16


class Lowering(NamedTuple):
    primitive: Primitive
    params: dict[str, Any]


def lowering(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """The primitive to bind for an equation of operands in other dtypes than traced.

    Its results have the dtypes that the plan gives them. It is for the device type, and
    for the processor at hand.
    """
    lower = _LOWERINGS.get(eqn.primitive.name)
    return lower(eqn, avals, device_type) if lower else _with_params(eqn)


def _with_params(eqn: JaxprEqn, **params: Any) -> Lowering:
    return Lowering(eqn.primitive, {**eqn.params, **params})


def _lower_product(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
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
    return _with_params(eqn, **params)


def _lower_scatter(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """What is bound for a scatter: its program for one element is in other dtypes."""
    del device_type
    public = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    params = {name: eqn.params[name] for name in names}
    eqns = jax.make_jaxpr(partial(public, **params))(*avals).eqns
    (traced,) = (found for found in eqns if found.primitive is eqn.primitive)
    return Lowering(eqn.primitive, dict(traced.params))


_LOWERINGS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], str], Lowering]] = {
    **dict.fromkeys(_primitives.MATMULS, _lower_product),
    **dict.fromkeys(_primitives.SCATTERS, _lower_scatter),
}
