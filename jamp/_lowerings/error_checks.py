"""What `jax.experimental.checkify` around a function under autocast has to know."""

from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.core.primitives import remat_p

from jamp._compat import error_checks, nan_error_check
from jamp._equations.walks import closed


def check_like(of_jax: Primitive, primitive: Primitive) -> None:
    """Has a primitive checked as the one of JAX's is for which it stands."""
    check: Any = error_checks.get(of_jax)
    if check is not None:
        # That for NaN binds the primitive; others, as for indices, bind JAX's.
        for_nan = getattr(check, "func", None) is nan_error_check
        own = partial(nan_error_check, primitive) if for_nan else check
        error_checks[primitive] = own


def _check_of_checkpoint(*taken: Any, jaxpr: Any, **params: Any) -> Any:
    """The checks of a checkpoint, as those of a jitted function if they need constants.

    JAX raises then, as for an index in the checkpoint; the program may hold none but
    those that autocast has made.
    """
    try:
        return _jax_check(*taken, jaxpr=jaxpr, **params)
    except ValueError as error:
        if "unpack" not in str(error):  # those constants, where none are expected
            raise
        program = closed(jaxpr)
        jitted = jax.jit(jaxpr_as_fun(program))
        (call,) = jax.make_jaxpr(jitted)(*program.in_avals).eqns
        return error_checks[call.primitive](*taken, **call.params)


# What JAX checks in checkpoints; importing this module puts another in its place.
_jax_check = error_checks[remat_p]
error_checks[remat_p] = _check_of_checkpoint
