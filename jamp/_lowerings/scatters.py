"""Scatters in other dtypes, which hold a program for one element."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jamp._lowerings.lowering import Lowering


def lower_scatter(eqn: JaxprEqn, avals: Sequence[Any], device_type: str) -> Lowering:
    """What is bound for a scatter: its program for one element is in other dtypes."""
    del device_type
    public = getattr(jax.lax, eqn.primitive.name.replace("-", "_"))

    def scatter(*operands: Any) -> Any:
        return public(
            *operands,
            eqn.params["dimension_numbers"],
            indices_are_sorted=eqn.params["indices_are_sorted"],
            unique_indices=eqn.params["unique_indices"],
            mode=eqn.params["mode"],
        )

    eqns = jax.make_jaxpr(scatter)(*avals).eqns
    (traced,) = (found for found in eqns if found.primitive is eqn.primitive)
    return Lowering(eqn.primitive, dict(traced.params))
