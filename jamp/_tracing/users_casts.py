"""Traces a function to a program in which the user's casts to float32 stand.

JAX drops a cast to the dtype that an array has already. While jamp traces, such a cast
in a file of the user's leaves a mark, as does a sum that is asked for this dtype, and
the marks of a traced program are replaced by conversions: a conversion of float32 to
float32 is one that the user wrote.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._compat import around_rules, frames, own_frames
from jamp._equations.walks import replaced
from jamp._policy.functions import code_of
from jamp._tracing.asked_dtypes import seeing_casts
from jamp._tracing.checkpoints import as_checkpoint
from jamp._tracing.locations import is_users
from jamp._tracing.named_axes import in_axes_of_now
from jamp._tracing.options import Options, options_in_force, tracing

# More bits than any dtype has: it rounds nothing, and is nothing that a user writes.
_MARK = {"exponent_bits": 12, "mantissa_bits": 53}
_CONVERSION = {"new_dtype": _dtypes.FLOAT32, "weak_type": False, "sharding": None}
# Programs with conversions for marks, by those with marks: what is jitted stays one
# program for all calls.
_converted: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def make_jaxpr(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Like `jax.make_jaxpr`, with options in force."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with (
            tracing(options),
            seeing_casts(_marked),
            around_rules(_is_tracing, in_axes_of_now),
            own_frames(),
        ):
            program = jax.make_jaxpr(fn)(*args, **kwargs)
        return replaced(program, lambda eqn: _known(eqn) is not eqn, _known, _converted)

    return traced


def _is_tracing() -> bool:
    # There are no options in another thread.
    return options_in_force() is not None


def _marked(array: Any, filename: str) -> Any:
    """An array after a cast, in this file, to the dtype that it has."""
    return kept_float32(array) if _is_tracing() and is_users(filename) else array


def kept_float32(array: Any) -> Any:
    """An array that is float32 where it is traced, and stays so under autocast."""
    aval = jax.typeof(array)
    if aval.dtype != _dtypes.FLOAT32 or aval.weak_type:
        return array
    try:
        return jax.lax.reduce_precision(array, **_MARK)
    except (KeyError, NotImplementedError):  # as of jet, which knows few primitives
        return array


def _is_mark(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "reduce_precision" and eqn.params == _MARK


def _known(eqn: JaxprEqn) -> Any:
    """An equation in the form in which it is planned."""
    if _is_mark(eqn):
        return eqn.replace(primitive=jax.lax.convert_element_type_p, params=_CONVERSION)
    return as_checkpoint(eqn)


def is_kept_cast(eqn: JaxprEqn) -> bool:
    """Whether an equation is a cast of the user's to the float32 that is there.

    JAX leaves no conversion that changes neither the dtype nor how weak it is.
    """
    if eqn.primitive is not jax.lax.convert_element_type_p:
        return False
    taken: Any = eqn.invars[0].aval
    is_float32 = taken.dtype == _dtypes.FLOAT32 and not taken.weak_type
    return is_float32 and eqn.params == _CONVERSION


def is_reshard(eqn: JaxprEqn) -> bool:
    """Whether a conversion, of JAX's own, gives an array another sharding."""
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    return bool(before.sharding != after.sharding)


@cache
def _explicit_codes() -> frozenset[int]:
    casts = (jnp.astype, jax.lax.convert_element_type, jnp.asarray, jnp.array)
    return frozenset(id(code_of(function)) for function in casts)


def is_explicit(eqn: JaxprEqn) -> bool:
    """Whether the user asked for the cast, and not JAX's promotion of operands."""
    codes, _ = frames(eqn)
    return not codes or not _explicit_codes().isdisjoint(map(id, codes))
