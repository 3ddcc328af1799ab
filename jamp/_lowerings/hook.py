"""The hook between a plan and JAX: what is bound for an equation in other dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun

from jamp import _dtypes, _primitives
from jamp._lowerings import comparisons, pools, quotients, sigmoids
from jamp._lowerings.bilinear import PRECISION, product_params
from jamp._lowerings.convolution import convolution_of_weights_p, convolution_p
from jamp._lowerings.product import product_of_weights_p, product_p

_PRODUCTS = {"conv_general_dilated": convolution_p, "dot_general": product_p}
# The same, of operands of which some are casts of weights.
_PRODUCTS_OF_WEIGHTS = {
    "conv_general_dilated": convolution_of_weights_p,
    "dot_general": product_of_weights_p,
}
# Other primitives, by the dtype of their first operand.
_OWN: Mapping[Any, Mapping[Primitive, Primitive]] = {
    _dtypes.FLOAT32: pools.OWN,
    _dtypes.BFLOAT16: {**comparisons.OWN, **pools.OWN, **sigmoids.OWN},
    _dtypes.FLOAT16: {**quotients.OWN, **pools.OWN, **sigmoids.OWN},
}


def has_own_product(name: str, dtypes: Sequence[Any]) -> bool:
    """Whether a product of jamp's own is bound for a primitive in some dtypes."""
    if name not in _PRODUCTS:
        return False
    return dtypes[0] == dtypes[1] and dtypes[0] in _dtypes.LOW_DTYPES


def has_own_primitive(
    eqn: JaxprEqn, dtypes: Sequence[Any], given: Iterable[Any]
) -> bool:
    """Whether a primitive of jamp's own is bound, for what has or had 16 bits.

    Args:
      eqn: the equation.
      dtypes: those of its operands.
      given: those in which the operands came.
    """
    if has_own_product(eqn.primitive.name, dtypes):
        return True
    low = any(dtype in _dtypes.LOW_DTYPES for dtype in (*dtypes, *given))
    return low and eqn.primitive in _own(dtypes)


def _own(dtypes: Sequence[Any]) -> Mapping[Primitive, Primitive]:
    return _OWN.get(dtypes[0], {}) if dtypes else {}


def with_own_primitive(eqn: JaxprEqn) -> JaxprEqn:
    """An equation that runs in float32, with the primitive that is bound for it."""
    own = _OWN[_dtypes.FLOAT32].get(eqn.primitive)
    return eqn if own is None else eqn.replace(primitive=own)


def bound_as(
    eqn: JaxprEqn,
    avals: Sequence[Any],
    weights: tuple[int, ...] = (),
    rounded: tuple[int, ...] = (),
    to: _dtypes.DType | None = None,
) -> tuple[Primitive, dict[str, Any]]:
    """The primitive to bind for operands in other dtypes than traced, and parameters.

    Its results have the dtypes that the plan gives them. Of a product some operands may
    be casts of weights, or rounded for it; one of jamp's may give another dtype than it
    multiplies in.
    """
    name, params = eqn.primitive.name, eqn.params
    dtypes = [aval.dtype for aval in avals]
    if has_own_product(name, dtypes):
        products = _PRODUCTS_OF_WEIGHTS if weights else _PRODUCTS
        return products[name], product_params(
            params, avals[0].dtype, weights, rounded, to
        )
    if name in _primitives.PRODUCTS:
        params = _params_of_product(params, avals)
    elif name in _primitives.SCATTERS:
        params = _params_of_scatter(eqn, avals)
    return _own(dtypes).get(eqn.primitive, eqn.primitive), params


def _params_of_product(params: dict[str, Any], avals: Sequence[Any]) -> dict[str, Any]:
    dtype = _dtypes.widest(aval.dtype for aval in avals[:2])
    params = {**params, "preferred_element_type": dtype}
    if dtype in _dtypes.LOW_DTYPES and params.get("precision") is not None:
        # A configured one is for float32; its transposes would take it again for None.
        params["precision"] = PRECISION
    return params


def _params_of_scatter(eqn: JaxprEqn, avals: Sequence[Any]) -> dict[str, Any]:
    """Those of a scatter whose program for one element is in other dtypes."""
    update: Any = eqn.params["update_jaxpr"]
    # What only puts elements where others are has none, or one without equations.
    if eqn.primitive.name == "scatter" and update is not None and update.eqns:
        return {**eqn.params, **_params_of_function(eqn, avals)}
    public = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    same = {name: eqn.params[name] for name in names}
    eqns = jax.make_jaxpr(partial(public, **same))(*avals).eqns
    (traced,) = (found for found in eqns if found.primitive is eqn.primitive)
    return dict(traced.params)


def _params_of_function(eqn: JaxprEqn, avals: Sequence[Any]) -> dict[str, Any]:
    """The function of an element that is applied where others would be put.

    It is computed as traced, and rounded.
    """
    update = jaxpr_as_fun(
        ClosedJaxpr(eqn.params["update_jaxpr"], eqn.params["update_consts"])
    )
    dtype = avals[0].dtype
    elements = [jax.ShapeDtypeStruct((), dtype)] * 2

    def rounded(*elements: Any) -> Any:
        wide = [x.astype(_dtypes.dtype_of(eqn.invars[0])) for x in elements]
        (result,) = update(*wide)
        return result.astype(dtype)

    traced = jax.make_jaxpr(rounded)(*elements)
    return {"update_jaxpr": traced.jaxpr, "update_consts": tuple(traced.consts)}
