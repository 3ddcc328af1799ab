"""Traces a function to a program in which the user's casts to float32 stand.

JAX drops a cast to the dtype that an array has already. While jamp traces, such a cast
in a file of the user's leaves a mark, and the marks of a traced program are replaced by
conversions: a conversion of float32 to float32 is one that the user wrote.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jamp import _dtypes
from jamp._compat import seeing_casts
from jamp._equations import equations
from jamp._tracing import regions
from jamp._tracing.origin import is_users

# Rounds nothing: these are the bits of float64. JAX itself rounds to float32's.
_MARK = {"exponent_bits": 11, "mantissa_bits": 52}
_CONVERSION = {"new_dtype": _dtypes.FLOAT32, "weak_type": False, "sharding": None}


def make_jaxpr(fn: Callable[..., Any], options: regions.Options) -> Callable[..., Any]:
    """Like `jax.make_jaxpr`, with options in force."""

    def traced(*args: Any) -> Any:
        with regions.tracing(options), seeing_casts(_marked):
            program = jax.make_jaxpr(fn)(*args)
        return _with_casts(program, {})

    return traced


def _marked(array: Any, filename: str) -> Any:
    """An array after a cast, in this file, to the dtype that it has."""
    if (
        regions.current() is None  # in another thread
        or array.dtype != _dtypes.FLOAT32
        or array.weak_type
        or not is_users(filename)
    ):
        return array
    try:
        return jax.lax.reduce_precision(array, **_MARK)
    except (KeyError, NotImplementedError):  # as of jet, which knows few primitives
        return array


def _is_mark(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "reduce_precision" and eqn.params == _MARK


def _with_casts(program: Any, known: dict[int, Any]) -> Any:
    """A program with conversions for its marks; one for each that is known by its id.

    So what several equations call stays one program.
    """
    if not any(map(_is_mark, equations(program))):
        return program
    if id(program) not in known:
        if isinstance(program, Jaxpr):
            changed = {"eqns": [_with_cast(eqn, known) for eqn in program.eqns]}
        else:
            changed = {"jaxpr": _with_casts(program.jaxpr, known)}
        known[id(program)] = program.replace(**changed)
    return known[id(program)]


def _with_cast(eqn: JaxprEqn, known: dict[int, Any]) -> Any:
    if _is_mark(eqn):
        return eqn.replace(primitive=jax.lax.convert_element_type_p, params=_CONVERSION)

    def converted(value: Any) -> Any:
        # Programs among other things are static data of another library, which may hold
        # them elsewhere too and compare them: Equinox does, as it calls what it has
        # converted.
        held = jax.tree.leaves(value) if isinstance(value, tuple) else [value]
        if not held or not all(isinstance(x, Jaxpr | ClosedJaxpr) for x in held):
            return value
        return jax.tree.map(lambda program: _with_casts(program, known), value)

    return eqn.replace(params={n: converted(value) for n, value in eqn.params.items()})


def is_kept_cast(eqn: JaxprEqn) -> bool:
    """Whether a conversion is a cast of the user's to the float32 that is there.

    JAX leaves no conversion that changes nothing.
    """
    taken: Any = eqn.invars[0].aval
    return _dtypes.dtype_of(eqn.outvars[0]) == taken.dtype and not taken.weak_type
