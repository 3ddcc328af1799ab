"""Quotients of float16, in range wherever float16 holds them and their gradients.

Instead of dividing by what is broadcast, or by a constant, XLA multiplies with the
inverse, which in float16 is inf for less than 1/65504. JAX's rule for the gradient
multiplies with the square of the inverse, which is zero in float16 from 4096 on, and by
the way it is computed from 256 on; no loss scale helps. PyTorch divides in float32, and
for the gradient by the denominator twice. So does this.
"""

from functools import partial
from typing import Any

from jax import lax
from jax.interpreters import ad

from jamp._compat import error_checks
from jamp._dtypes import FLOAT32, widened
from jamp._lowerings.own_primitives import (
    binding_own,
    like,
    register,
    with_rules_of_jax,
)


def _divide(above: Any, below: Any) -> Any:
    return lax.div(widened(above), widened(below)).astype(above.dtype)


_quotient = like(lax.div_p)
register(_quotient, _divide)
OWN = {lax.div_p: _quotient}
with_rules_of_jax(OWN)


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (_, denominator), (tangent, below) = primals, tangents
    result = _quotient.bind(*primals)
    if not isinstance(tangent, ad.Zero):
        tangent = _quotient.bind(tangent, denominator)
    if not isinstance(below, ad.Zero):
        along, *wide = (x.astype(FLOAT32) for x in (below, result, denominator))
        term = lax.mul(along, lax.neg(lax.div(*wide)))
        tangent = ad.add_tangents(tangent, term.astype(result.dtype))
    return result, tangent


def _checked(*state_and_operands: Any) -> Any:
    """What checkify asks of a quotient: whether it divides by zero."""
    *state, above, below = state_and_operands
    return binding_own(OWN, partial(error_checks[lax.div_p], *state), (above, below))


ad.primitive_jvps[_quotient] = _jvp
error_checks[_quotient] = _checked
