"""Scatters in other dtypes, which hold a program for one element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn


def lower_scatter(
    eqn: JaxprEqn, avals: Sequence[Any], device_type: str
) -> dict[str, Any]:
    """The program for one element of a scatter, in the dtype of its operands."""
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
    names = ("update_jaxpr", "update_consts")
    return {name: traced.params[name] for name in names}
