"""Walks through the equations of a program, and what one of them reads and holds."""

from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jamp._dtypes import FLOAT32, dtype_of, eligible, is_double, shape_of
from jamp._primitives import CALLS, CHEAP, PLAIN

T = TypeVar("T")


def equations(
    program: Any,
    enter: Callable[[JaxprEqn], bool] = lambda eqn: True,
    *,
    once: bool = True,
) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, and those inside of equations that `enter` admits.

    Those of a program that several equations call come once, or at each call.
    """
    return nested(program.eqns, enter, once=once)


def nested(
    eqns: Iterable[JaxprEqn],
    enter: Callable[[JaxprEqn], bool] = lambda eqn: True,
    *,
    once: bool = True,
) -> Iterator[JaxprEqn]:
    """Some equations, each followed by those that it holds; see `equations`."""
    entered: set[int] = set()

    def walk(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
        for eqn in eqns:
            yield eqn
            if eqn.primitive.name in PLAIN or not enter(eqn):
                continue
            for inner in jaxprs_in_params(eqn.params):
                if not (once and id(inner) in entered):
                    entered.add(id(inner))
                    yield from walk(inner.eqns)

    return walk(eqns)


def atoms(eqns: Iterable[JaxprEqn]) -> Iterator[Any]:
    """What some equations take and give."""
    return (atom for eqn in eqns for atom in (*eqn.invars, *eqn.outvars))


def holds_any(eqns: Iterable[JaxprEqn], names: Collection[str]) -> bool:
    """Whether one of these primitives is in some equations, or in their programs."""
    return any(eqn.primitive.name in names for eqn in nested(eqns))


def holds_program(eqn: JaxprEqn) -> bool:
    return any(True for _ in jaxprs_in_params(eqn.params))


def programs_of(value: Any) -> list[Any]:
    """The programs of which a parameter consists.

    Programs among other things are static data of another library, which may hold them
    elsewhere too, compare them, and run them with other constants: Equinox does, as it
    calls what it has converted.
    """
    held = jax.tree.leaves(value) if isinstance(value, tuple) else [value]
    known = all(isinstance(leaf, Jaxpr | ClosedJaxpr) for leaf in held)
    return held if known else []


def closed(program: Any) -> Any:
    """A program that an equation holds without constants, as a closed one."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def constants(program: Any) -> Iterator[Any]:
    """The constants of a closed jaxpr, and of those inside of it."""
    yield from program.consts
    for eqn in equations(program):
        for value in eqn.params.values():
            for held in programs_of(value):
                yield from closed(held).consts


def read_by(eqn: JaxprEqn) -> list[Any]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def contracted(eqn: JaxprEqn) -> list[Any]:
    """The sizes of the dimensions over which a product adds up."""
    left, right = (shape_of(var) for var in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        return [right[d] for d in eqn.params["dimension_numbers"].rhs_spec[1:]]
    ragged: Any = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = (
        ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    )
    (contracting, _), _ = numbers
    return [left[d] for d in contracting]


def adds_up_groups(eqn: JaxprEqn) -> bool:
    """Whether each result of a product adds up the rows of one of several groups."""
    ragged: Any = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        return False
    (contracting, _), _ = ragged.dot_dimension_numbers
    return not {*contracting}.isdisjoint(ragged.lhs_ragged_dimensions)


def is_cheap(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether some equations cost little to compute again."""
    return all(eqn.primitive.name in CHEAP for eqn in nested(eqns))


def runs_in_float32(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether all that autocast could cast in some equations is float32 as traced."""
    return all(
        dtype is None or dtype == FLOAT32 or not (eligible(dtype) or is_double(dtype))
        for dtype in map(dtype_of, atoms(nested(eqns)))
    )


def followed(
    eqns: Iterable[JaxprEqn],
    known: dict[Any, T],
    make: Callable[[JaxprEqn, list[T]], Sequence[T]],
    literal: Callable[[Literal], T],
    unknown: T,
) -> dict[Any, T]:
    """Adds what is known of the variables that equations make, through calls too.

    Args:
      eqns: the equations.
      known: what is known of variables that they read.
      make: what is known of each result of an equation that is no call, given what is
        of its operands.
      literal: what is known of a literal.
      unknown: what is known of other variables.
    """

    def read(atom: Any, known: dict[Any, T]) -> T:
        if isinstance(atom, Literal):
            return literal(atom)
        return known.get(atom, unknown)

    for eqn in eqns:
        taken = [read(atom, known) for atom in eqn.invars]
        made: Sequence[T]
        if eqn.primitive.name in CALLS:
            called = closed(eqn.params[CALLS[eqn.primitive.name]]).jaxpr
            given = dict(zip(called.invars, taken, strict=True))
            inner = followed(called.eqns, given, make, literal, unknown)
            made = [read(atom, inner) for atom in called.outvars]
        else:
            made = make(eqn, taken)
        known.update(zip(eqn.outvars, made, strict=True))
    return known


def replaced(
    program: Any,
    wanted: Callable[[JaxprEqn], bool],
    change: Callable[[JaxprEqn], Any],
    known: MutableMapping[Any, Any],
) -> Any:
    """A program in which the equations that are wanted are changed, inner ones too.

    The programs that are known by now are not made again, so that what several
    equations call stays one program. None is known of one that stays as it is: no
    value is its own key, for where keys are to be weak.
    """
    if program in known:
        found = known[program]
        return program if found is None else found
    if not any(map(wanted, equations(program))):
        known[program] = None
        return program
    if isinstance(program, Jaxpr):
        eqns = [replaced_in(eqn, wanted, change, known) for eqn in program.eqns]
        parts = {"eqns": eqns}
    else:
        parts = {"jaxpr": replaced(program.jaxpr, wanted, change, known)}
    known[program] = program.replace(**parts)
    return known[program]


def replaced_in(
    eqn: JaxprEqn,
    wanted: Callable[[JaxprEqn], bool],
    change: Callable[[JaxprEqn], Any],
    known: MutableMapping[Any, Any],
) -> Any:
    """An equation, changed if it is wanted, and so are those that it holds."""

    def inside(value: Any) -> Any:
        if not programs_of(value):
            return value
        return jax.tree.map(lambda inner: replaced(inner, wanted, change, known), value)

    eqn = change(eqn) if wanted(eqn) else eqn
    return eqn.replace(params={n: inside(value) for n, value in eqn.params.items()})
