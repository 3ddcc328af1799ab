"""The run in float32: an equation, and the programs in it, with 16-bit dtypes widened.

Where all that is in 16 bits becomes float32, a program's dtypes agree as they did.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from jamp import _dtypes, _equations, _primitives
from jamp._lowerings.hook import bound_as

# They run in other dtypes if their programs do.
_HOLDERS = _primitives.SCATTERS | {
    "cond",
    "custom_linear_solve",
    "reduce",
    "reduce_window",
    "scan",
    "shard_map",
    "while",
}


def run_wide(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """The results of an equation for operands that are float32 instead of 16 bits."""
    if eqn.primitive.name == "reduce_precision":
        # It only rounds, as a cast to 16 bits would.
        return list(arrays)
    if not _is_narrow(eqn):
        return _equations.bind(eqn, arrays)
    if eqn.primitive.name in _primitives.SCATTERS:
        primitive, params = bound_as(eqn, list(map(jax.typeof, arrays)))
        return _equations.bind_primitive(primitive, params, arrays)
    if _is_widened(eqn):
        return _equations.bind(eqn, arrays, **_wide_params(eqn))
    narrowed = [
        array.astype(_dtypes.dtype_of(var)) if _in_16_bits(var) else array
        for var, array in zip(eqn.invars, arrays, strict=True)
    ]
    return list(map(_dtypes.widened, _equations.bind(eqn, narrowed)))


def is_unseen(eqn: JaxprEqn) -> bool:
    """Whether an equation holds a program with 16 bits that runs so beside float32."""
    return _holds_narrow(eqn) and not _is_widened(eqn)


def _in_16_bits(atom: Any) -> bool:
    return _dtypes.narrow(_dtypes.dtype_of(atom))


def _is_narrow(eqn: JaxprEqn) -> bool:
    """Whether an equation has 16 bits, or holds a program that has."""
    return any(map(_in_16_bits, _equations.atoms([eqn]))) or _holds_narrow(eqn)


def _holds_narrow(eqn: JaxprEqn) -> bool:
    programs = jaxprs_in_params(eqn.params)
    return any(_is_narrow(inner) for program in programs for inner in program.eqns)


def _is_widened(eqn: JaxprEqn) -> bool:
    """Whether an equation runs in float32, and so does all that it holds."""
    if not _is_narrow(eqn):
        return True
    name, held = eqn.primitive.name, [*jaxprs_in_params(eqn.params)]
    known = name in _primitives.CALLS or name in _HOLDERS
    if name in _primitives.DTYPE_BOUND or (held and not known):
        return False
    return all(_is_widened(inner) for program in held for inner in program.eqns)


def _wide_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation that are others in float32."""
    if eqn.primitive.name == "reduce_precision":
        dtype = _dtypes.dtype_of(eqn.outvars[0])
        info = jnp.finfo(_dtypes.widest([dtype, _dtypes.FLOAT32]))
        return {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    wide = {name: _wide(name, value) for name, value in eqn.params.items()}
    if eqn.primitive.name in _primitives.MATMULS:
        wide["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return wide


def _wide(name: str, value: Any) -> Any:
    if name.endswith(("dtype", "element_type")) and isinstance(value, np.dtype):
        return _dtypes.FLOAT32 if _dtypes.narrow(value) else value
    if not _equations.programs_of(value):
        return value
    return jax.tree.map(_wide_program, value)


def _wide_program(program: Any) -> Any:
    if not hasattr(program, "consts"):
        return _wide_jaxpr(program)
    # Newer JAX has one class for programs with constants and without.
    consts = list(map(_dtypes.widened, program.consts))
    return ClosedJaxpr(_wide_jaxpr(program.jaxpr), consts)


def _wide_jaxpr(jaxpr: Any) -> Any:
    known: dict[Any, Any] = {}

    def wide(atom: Any) -> Any:
        if not _in_16_bits(atom):
            return atom
        aval = atom.aval.update(dtype=_dtypes.FLOAT32)
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val, _dtypes.FLOAT32), aval)
        return known.setdefault(atom, Var(aval))

    def all_wide(part: Any) -> dict[str, Any]:
        names = ("invars", "outvars")
        return {name: list(map(wide, getattr(part, name))) for name in names}

    eqns = [
        eqn.replace(**all_wide(eqn), params={**eqn.params, **_wide_params(eqn)})
        for eqn in jaxpr.eqns
    ]
    constvars = list(map(wide, jaxpr.constvars))
    return jaxpr.replace(constvars=constvars, eqns=eqns, **all_wide(jaxpr))
