"""The hook between a plan and JAX: which primitive is bound for an equation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jamp import _primitives as primitives
from jamp._lowerings.lowering import Lowering, with_params
from jamp._lowerings.products import lower_product
from jamp._lowerings.scatters import lower_scatter

_LOWERINGS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], str], Lowering]] = {
    **dict.fromkeys(primitives.MATMULS, lower_product),
    **dict.fromkeys(primitives.SCATTERS, lower_scatter),
}


def lowering(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """The primitive to bind for an equation in other dtypes, and its parameters.

    Args:
      eqn: the equation as traced.
      avals: its operands, in the dtypes in which they come.
      device_type: what the program is for; the processor at hand is looked at too.

    Returns:
      A primitive whose results have the dtypes that the plan gives them, and all of its
      parameters.
    """
    lower = _LOWERINGS.get(eqn.primitive.name)
    return lower(eqn, avals, device_type) if lower else with_params(eqn)
