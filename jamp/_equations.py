"""Equations of a program: a walk through all of them, what one reads, binding one."""

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    jaxpr_as_fun,
    jaxprs_in_params,
)

from jamp._compat import array_in, becomes_a_program, checkpoint, settings
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


def programs_of(value: Any) -> list[Any]:
    """The programs of which a parameter consists.

    Programs among other things are static data of another library, which may hold them
    elsewhere too, compare them, and run them with other constants: Equinox does, as it
    calls what it has converted.
    """
    held = jax.tree.leaves(value) if isinstance(value, tuple) else [value]
    known = all(isinstance(leaf, Jaxpr | ClosedJaxpr) for leaf in held)
    return held if known else []


def number_of(scalar: Any) -> Hashable:
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
        return number_of(atom.val) if isinstance(atom, Literal) else numbers[atom]

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


def closed(program: Any) -> Any:
    """A program that an equation holds without constants, as a closed one."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def read_by(eqn: JaxprEqn) -> list[Any]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def contracted(eqn: JaxprEqn) -> list[Any]:
    """The sizes of the dimensions over which a product adds up."""
    left, right = (shape_of(var) for var in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return [left[d] for d in contracting]
    if eqn.primitive.name == "conv_general_dilated":
        return [right[d] for d in eqn.params["dimension_numbers"].rhs_spec[1:]]
    # ragged_dot: every row of the left operand meets one of the matrices.
    return [left[-1]]


def constants(program: Any) -> Iterator[Any]:
    """The constants of a closed jaxpr, and of those inside of it."""
    yield from program.consts
    for eqn in equations(program):
        for value in eqn.params.values():
            for held in programs_of(value):
                yield from closed(held).consts


def holds_any(eqns: Iterable[JaxprEqn], names: Collection[str]) -> bool:
    """Whether one of these primitives is in some equations, or in their programs."""
    return any(eqn.primitive.name in names for eqn in nested(eqns))


def holds_program(eqn: JaxprEqn) -> bool:
    return any(True for _ in jaxprs_in_params(eqn.params))


def bind(eqn: JaxprEqn, arrays: Sequence[Any], **params: Any) -> list[Any]:
    """Binds an equation's primitive, with some other parameters than traced."""
    return bind_primitive(eqn.primitive, {**eqn.params, **params}, arrays)


def bind_primitive(
    primitive: Primitive, params: dict[str, Any], arrays: Sequence[Any]
) -> list[Any]:
    if primitive.name in _OPENED and _checks_each():
        return _op_by_op(closed(params[CALLS[primitive.name]]), arrays)
    results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def looks_for_nans() -> bool:
    """Whether JAX raises where a NaN or an infinity is computed."""
    return bool(_looked_for())


def _looked_for() -> list[Callable[[Any], Any]]:
    """What tells the numbers at which JAX raises."""
    checks = {"jax_debug_nans": jax.numpy.isnan, "jax_debug_infs": jax.numpy.isinf}
    return [check for flag, check in checks.items() if getattr(jax.config, flag)]


def _checks_each() -> bool:
    """Whether operations run at this moment, and JAX looks for NaN in what each gives.

    Of what runs as one for it, as a jitted function does, it would not say where.
    """
    return looks_for_nans() and not becomes_a_program()


def checkpointed(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that is run again for its derivative, but where JAX looks for NaN."""
    return function if _checks_each() else checkpoint(function, **options)


# Calls that JAX itself runs op by op to find a NaN that they give.
_OPENED = frozenset({"closed_call", "jit", "remat2"})


def _op_by_op(program: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of a program, of which each operation runs by itself.

    As it does itself, JAX looks for NaN inside only if there is one in a result: one
    that `where` leaves out does no harm.
    """
    # Operations that ran by themselves unseen JAX would not look at later either.
    with jax.debug_nans(False), jax.debug_infs(False):
        results: list[Any] = jax.jit(jaxpr_as_fun(program))(*arrays)
    return results if _are_fine(results) else _each_by_itself(program, arrays)


def _are_fine(arrays: Sequence[Any]) -> bool:
    """Whether JAX would not raise for some arrays; False where that is not known."""
    held = list(map(array_in, arrays))
    if any(array is None for array in held):
        return False
    inexact = [a for a in held if jax.numpy.issubdtype(a.dtype, np.inexact)]
    return not any(check(array).any() for array in inexact for check in _looked_for())


def _each_by_itself(program: Any, arrays: Sequence[Any]) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, arrays, strict=True))
    return values_of(jaxpr.outvars, evaluated(jaxpr.eqns, env))


def evaluated(eqns: Iterable[JaxprEqn], env: dict[Any, Any]) -> dict[Any, Any]:
    """The arrays of variables, and of those that equations make of them."""
    for eqn in eqns:
        with settings(eqn):
            results = bind(eqn, values_of(eqn.invars, env))
        env.update(zip(eqn.outvars, results, strict=True))
    return env


def values_of(atoms: Iterable[Any], env: dict[Any, Any]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]
