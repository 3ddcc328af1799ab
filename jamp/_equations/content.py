"""What equal equations, programs and constants have in common, as keys of caches."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jamp._equations.walks import closed


def constant_key(scalar: Any) -> Hashable:
    """What two equal constants have in common."""
    return jax.typeof(scalar), np.asarray(scalar).tobytes()


def content(
    invars: Sequence[Any],
    eqns: Iterable[JaxprEqn],
    outvars: Iterable[Any],
    also: Callable[[JaxprEqn], Hashable] = lambda eqn: None,
    custom: Callable[[JaxprEqn], Hashable] = lambda eqn: None,
    constant: Callable[[Any], Hashable] = lambda array: None,
) -> Hashable:
    """What programs of equal equations have in common; None if it cannot be told.

    Args:
      invars: what the equations take.
      eqns: the equations.
      outvars: what of theirs, and of `invars`, is wanted.
      also: what else is to be equal of an equation.
      custom: what is to be equal of a call of a function with rules of its own, which
        are other objects in every trace; None if it cannot be told.
      constant: the same of a constant that a program inside has.
    """
    numbers = {var: number for number, var in enumerate(invars)}

    def name(atom: Any) -> Hashable:
        return constant_key(atom.val) if isinstance(atom, Literal) else numbers[atom]

    def inside(value: Any) -> Any:
        # As the branches of a cond.
        held = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(one, Jaxpr | ClosedJaxpr) for one in held):
            return value
        ask = partial(content_of, also=also, custom=custom, constant=constant)
        found = tuple(map(ask, held))
        return value if None in found else found

    parts: list[Hashable] = [tuple(var.aval for var in invars)]
    for eqn in eqns:
        if eqn.primitive.name.startswith("custom_"):
            called = custom(eqn)
            if called is None:
                return None
        else:
            called = tuple([(k, inside(value)) for k, value in eqn.params.items()])
        operands = tuple(map(name, eqn.invars))
        parts.append((eqn.primitive, called, operands, eqn.ctx, also(eqn)))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    return tuple(parts), tuple(map(name, outvars))


def content_of(
    program: Any,
    *,
    constant: Callable[[Any], Hashable] = lambda array: None,
    **ask: Callable[[JaxprEqn], Hashable],
) -> Hashable:
    """The same of a program; None also where it has constants that cannot be told."""
    program = closed(program)
    jaxpr, held = program.jaxpr, tuple(map(constant, program.consts))
    if None in held or len(held) < len(jaxpr.constvars):
        return None
    invars = [*jaxpr.constvars, *jaxpr.invars]
    made = content(invars, jaxpr.eqns, jaxpr.outvars, constant=constant, **ask)
    return made and (made, held)


def is_key(key: Any) -> bool:
    """Whether it is a key; None, which has a hash, stands for what cannot be told."""
    try:
        hash(key)
    except TypeError:
        return False
    return key is not None
