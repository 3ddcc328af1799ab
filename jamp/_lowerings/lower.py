"""The hook between a plan and JAX: what is bound on a backend and a processor."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Primitive

from jamp import _dtypes, _primitives
from jamp._lowerings.bilinear import PRECISION, product_params
from jamp._lowerings.convolution import convolution_p
from jamp._lowerings.product import product_p


class Lowering(NamedTuple):
    primitive: Primitive
    params: dict[str, Any]


_PRODUCTS = {"conv_general_dilated": convolution_p, "dot_general": product_p}


def has_own_product(name: str, dtypes: Sequence[Any]) -> bool:
    """Whether a product of jamp's own is bound for a primitive in some dtypes."""
    if name not in _PRODUCTS:
        return False
    return dtypes[0] == dtypes[1] and dtypes[0] in _dtypes.LOW_DTYPES


def lowering(
    eqn: JaxprEqn,
    avals: Sequence[Any],
    device_type: str,
    weights: tuple[int, ...] = (),
) -> Lowering:
    """The primitive to bind for an equation of operands in other dtypes than traced.

    Its results have the dtypes that the plan gives them. It is for the device type, and
    for the processor at hand. Of a product some operands may be casts of weights.
    """
    name = eqn.primitive.name
    if has_own_product(name, [aval.dtype for aval in avals]):
        params = product_params(eqn.params, avals[0].dtype, weights)
        return Lowering(_PRODUCTS[name], params)
    lower = _LOWERINGS.get(name)
    return lower(eqn, avals, device_type) if lower else _with_params(eqn)


def _with_params(eqn: JaxprEqn, **params: Any) -> Lowering:
    return Lowering(eqn.primitive, {**eqn.params, **params})


def _lower_product(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    del device_type
    dtype = _dtypes.widest(aval.dtype for aval in avals[:2])
    params: dict[str, Any] = {"preferred_element_type": dtype}
    if dtype in _dtypes.LOW_DTYPES and eqn.params.get("precision") is not None:
        # A configured one is for float32; its transposes would take it again for None.
        params["precision"] = PRECISION
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
