"""Residuals: what the forward pass of a function keeps for its backward pass."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.tree import leaves

from jamp import _dtypes, _primitives

# Calls in which the maker of a result is looked for.
_LOOKED_INTO = {"jit", "closed_call"}


class Residual(NamedTuple):
    """A buffer that the forward pass leaves for the backward pass."""

    call: tuple[int, ...]  # the calls that its equation stands in
    var: Any
    eqn: JaxprEqn  # the equation that made it

    @property
    def shape(self) -> tuple[int, ...]:
        return _dtypes.shape_of(self.var)

    @property
    def dtype(self) -> _dtypes.DType:
        return _dtypes.dtype_of(self.var)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        return _dtypes.known_size(self.shape) * self.dtype.itemsize


class Residuals(NamedTuple):
    autocast: tuple[Residual, ...]  # under autocast
    as_written: tuple[Residual, ...]  # of the function as it is written


def bytes_by_dtype(residuals: Iterable[Residual]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for residual in residuals:
        total[str(residual.dtype)] += residual.nbytes
    return dict(sorted(total.items()))


def find_residuals(fn: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """The buffers that differentiating a function keeps.

    It is differentiated at the first of its arguments that holds floating arrays. The
    buffers are the arrays that the function returned by `jax.vjp` holds. A buffer is
    counted once, however often it is held, and a reshape, transpose or broadcast of it
    is the same buffer. Left out are the arguments (parameters, batch), which are there
    anyway, and what is computed from constants alone; a cast of a parameter is counted.
    This is what the program asks for: the compiler can keep less, by computing values
    again. Nothing is computed here.
    """
    floating = (i for i, arg in enumerate(args) if any(map(_is_float, leaves(arg))))
    at = next(floating, 0)

    def saved(*args: Any) -> Any:
        def floats(*chosen: Any) -> list[Any]:
            results = fn(*args[:at], *chosen, *args[at + 1 :])
            return list(filter(_is_float, leaves(results)))

        return jax.vjp(floats, *args[at : at + 1])[1]

    makers = _makers_of_results(jax.make_jaxpr(saved)(*args).jaxpr)
    found = {(m.call, m.var): m for m in makers if isinstance(m, Residual)}
    return tuple(sorted(found.values(), key=lambda residual: -residual.nbytes))


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _makers_of_results(jaxpr: Any, call: tuple[int, ...] = ()) -> list[Any]:
    """What makes the buffers of a program's results.

    The number of an argument stands for it, and None for what constants alone give.
    """
    makers: dict[Any, Any] = {var: i for i, var in enumerate(jaxpr.invars)}
    makers.update((var, var) for var in jaxpr.constvars)

    def maker_of(atom: Any) -> Any:
        return None if isinstance(atom, Literal) else makers[atom]

    for eqn in jaxpr.eqns:
        operands, name = list(map(maker_of, eqn.invars)), eqn.primitive.name
        made: list[Any] = [Residual(call, var, eqn) for var in eqn.outvars]
        if all(operand is None for operand in operands) and not eqn.effects:
            # What a reference is made with is not all that is read from it.
            made = [None] * len(made)
        elif name in _LOOKED_INTO:
            (program,) = jaxprs_in_params(eqn.params)
            inner = _makers_of_results(program, (*call, id(eqn)))
            made = [operands[m] if isinstance(m, int) else m for m in inner]
        elif name in _primitives.VIEWS:
            made = operands[:1]
        makers.update(zip(eqn.outvars, made, strict=True))
    return list(map(maker_of, jaxpr.outvars))
