"""The run in float32: an equation, and the programs in it, with 16-bit dtypes widened.

Where all that is in 16 bits becomes float32, a program's dtypes agree as they did.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jamp import _dtypes, _primitives
from jamp._equations import binding, walks
from jamp._plan.plain_equations import rounds_nothing

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


def without_marks(program: Any) -> Any:
    """A program in which what 16 bits hold already is not rounded to them again.

    Autocast and JAX do so to what is saved. Beside float32 it would be one more
    rounding, unlike those that the user wrote.
    """
    makers = {var: eqn for eqn in walks.equations(program) for var in eqn.outvars}

    def is_mark(eqn: JaxprEqn) -> bool:
        made_by = filter(None, map(makers.get, walks.read_by(eqn)))
        casts = [e for e in made_by if e.primitive.name == "convert_element_type"]
        narrow = filter(_in_16_bits, walks.atoms([eqn, *casts]))
        return any(rounds_nothing(eqn, _dtypes.dtype_of(atom)) for atom in narrow)

    def rounding_nothing(eqn: JaxprEqn) -> Any:
        return eqn.replace(params={"exponent_bits": 8, "mantissa_bits": 23})

    return walks.replaced(program, is_mark, rounding_nothing, {})


def run_wide(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """The results of an equation for operands that are float32 instead of 16 bits."""
    if not _is_narrow(eqn):
        return binding.bind(eqn, arrays)
    if _is_widened(eqn):
        return binding.bind(eqn, arrays, **_wide_params(eqn, {}))
    narrowed = [
        array.astype(_dtypes.dtype_of(var)) if _in_16_bits(var) else array
        for var, array in zip(eqn.invars, arrays, strict=True)
    ]
    return list(map(_dtypes.widened, binding.bind(eqn, narrowed)))


def is_unseen(eqn: JaxprEqn) -> bool:
    """Whether an equation holds a program with 16 bits that runs so beside float32."""
    held = any(_has_16_bits(inner) for inner in [*walks.nested([eqn])][1:])
    return held and (runs_once(eqn) or not _is_widened(eqn))


def runs_once(eqn: JaxprEqn) -> bool:
    """Whether an equation may not run twice: it has effects, or draws other numbers."""
    return bool(eqn.effects) or walks.holds_any([eqn], {"rng_uniform"})


def _in_16_bits(atom: Any) -> bool:
    return _dtypes.below_float32(_dtypes.dtype_of(atom))


def _has_16_bits(eqn: JaxprEqn) -> bool:
    return any(map(_in_16_bits, walks.atoms([eqn])))


def _is_narrow(eqn: JaxprEqn) -> bool:
    """Whether an equation has 16 bits, or holds a program that has."""
    return any(map(_has_16_bits, walks.nested([eqn])))


def _is_widened(eqn: JaxprEqn) -> bool:
    """Whether an equation runs in float32, and so does all that it holds."""
    return all(map(_is_not_bound, walks.nested([eqn])))


def _is_not_bound(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    known = name in _primitives.CALLS or name in _HOLDERS
    bound = name in _primitives.DTYPE_BOUND
    if bound or (walks.holds_program(eqn) and not known):
        return not _is_narrow(eqn)
    return True


# Programs by the id of those that they were widened from: several equations may hold
# one.
_Known = dict[int, Any]


def _wide_params(eqn: JaxprEqn, known: _Known) -> dict[str, Any]:
    """The parameters of an equation as they are in float32."""
    wide = {name: _wide(name, value, known) for name, value in eqn.params.items()}
    if eqn.primitive.name in _primitives.PRODUCTS:
        wide["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return wide


def _wide(name: str, value: Any, known: _Known) -> Any:
    if name.endswith(("dtype", "element_type")) and isinstance(value, np.dtype):
        return _dtypes.FLOAT32 if _dtypes.below_float32(value) else value
    if not walks.programs_of(value):
        return value
    return jax.tree.map(lambda program: _wide_program(program, known), value)


def _wide_program(program: Any, known: _Known) -> Any:
    if id(program) not in known:
        if hasattr(program, "consts"):
            # Newer JAX has one class for programs with constants and without.
            consts = list(map(_wide_constant, program.consts))
            wide = ClosedJaxpr(_wide_jaxpr(program.jaxpr, known), consts)
        else:
            wide = _wide_jaxpr(program, known)
        known[id(program)] = wide
    return known[id(program)]


def _wide_constant(value: Any) -> Any:
    # JAX would trace a cast of its own.
    narrow = _dtypes.below_float32(getattr(value, "dtype", None))
    return np.asarray(value).astype(_dtypes.FLOAT32) if narrow else value


def _wide_jaxpr(jaxpr: Any, known: _Known) -> Any:
    made: dict[Any, Any] = {}

    def wide(atom: Any) -> Any:
        if not _in_16_bits(atom):
            return atom
        aval = atom.aval.update(dtype=_dtypes.FLOAT32)
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val, _dtypes.FLOAT32), aval)
        return made.setdefault(atom, Var(aval))

    def all_wide(part: Any) -> dict[str, Any]:
        names = ("invars", "outvars")
        return {name: list(map(wide, getattr(part, name))) for name in names}

    eqns = [
        eqn.replace(**all_wide(eqn), params={**eqn.params, **_wide_params(eqn, known)})
        for eqn in jaxpr.eqns
    ]
    constvars = list(map(wide, jaxpr.constvars))
    return jaxpr.replace(constvars=constvars, eqns=eqns, **all_wide(jaxpr))
