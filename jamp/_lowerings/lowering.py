"""What is bound for an equation."""

from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Primitive


class Lowering(NamedTuple):
    """A primitive and all of its parameters."""

    primitive: Primitive
    params: dict[str, Any]


def with_params(eqn: JaxprEqn, **params: Any) -> Lowering:
    """The equation's own primitive, with some other parameters."""
    return Lowering(eqn.primitive, {**eqn.params, **params})
