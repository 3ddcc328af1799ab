"""What can be told of a program without running it: saved residuals, casts, memory."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import optax
from jax.extend.core import Literal, jaxprs_in_params

import jamp

# What they make is, in torch's words, a view: no buffer of its own.
VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"}
CALLS = {"jit", "closed_call"}

TRANSFORMS = tuple(str(Path(module.__file__).parent) for module in (jax, jamp))
LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (flax, optax))


class Residual(NamedTuple):
    """A buffer that the forward pass leaves for the backward pass.

    `operation` is the primitive that made it; `lines` are where that stands, in a
    library and in the model.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    operation: str
    lines: tuple[str, ...]


def residuals(fn: Callable[..., Any], *args: Any) -> list[Residual]:
    """The buffers that differentiating `fn` at its first argument saves.

    They are the arrays that the function returned by `jax.vjp` holds. A buffer is
    counted once, however often it is held, and a reshape, transpose or broadcast of it
    is the same buffer. Left out are the arguments of `fn` (parameters, batch), which
    are there anyway, and what is computed from constants alone; a cast of a parameter
    is counted. This is what the program asks for: the compiler can keep less, by
    computing values again. Nothing is computed here.

    Args:
      fn: a function that returns a pair of a scalar and something else.
      *args: its arguments, arrays or their shapes.
    """

    def saved(first: Any, *rest: Any) -> Any:
        _, vjp, _ = jax.vjp(lambda value: fn(value, *rest), first, has_aux=True)
        return vjp

    jaxpr = jax.make_jaxpr(saved)(*args)
    found = {}
    for var in jaxpr.jaxpr.outvars:
        made = _maker(var, jaxpr.jaxpr)
        if isinstance(made, _Maker):
            found[made.call, made.var] = made
    return sorted(map(_describe, found.values()), key=lambda saved: -saved.nbytes)


def bytes_by_dtype(saved: list[Residual]) -> dict[str, int]:
    """Bytes of saved residuals, by dtype and in total."""
    totals: Counter[str] = Counter()
    for residual in saved:
        totals[residual.dtype] += residual.nbytes
    return {**dict(sorted(totals.items())), "total": totals.total()}


class _Maker(NamedTuple):
    """The equation that makes a buffer, and the calls that it stands in."""

    call: tuple[int, ...]
    var: Any
    eqn: Any


def _maker(var: Any, jaxpr: Any, call: tuple[int, ...] = ()) -> Any:
    """What makes the buffer of a variable, or the input that it is, or None."""
    makers, constants = {}, set()
    for eqn in jaxpr.eqns:
        makers.update(dict.fromkeys(eqn.outvars, eqn))
        if all(isinstance(v, Literal) or v in constants for v in eqn.invars):
            constants.update(eqn.outvars)
    while not isinstance(var, Literal) and var not in constants:
        eqn = makers.get(var)
        if eqn is None:
            return var
        if eqn.primitive.name in CALLS:
            (inner,) = jaxprs_in_params(eqn.params)
            result = inner.outvars[eqn.outvars.index(var)]
            made = _maker(result, inner, (*call, id(eqn)))
            if made not in inner.invars:
                return made
            var = eqn.invars[inner.invars.index(made)]
        elif eqn.primitive.name in VIEWS:
            var = eqn.invars[0]
        else:
            return _Maker(call, var, eqn)
    return None


def _describe(made: _Maker) -> Residual:
    aval = made.var.aval
    return Residual(
        shape=aval.shape,
        dtype=str(aval.dtype),
        nbytes=aval.size * aval.dtype.itemsize,
        operation=made.eqn.primitive.name,
        lines=_lines(made.eqn),
    )


def _lines(eqn: Any) -> tuple[str, ...]:
    """The innermost lines outside JAX and jamp, and outside the libraries too."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    lines = []
    for outside in (TRANSFORMS, TRANSFORMS + LIBRARIES):
        for frame in frames:
            if not frame.file_name.startswith(outside):
                lines.append(f"{Path(frame.file_name).name}:{frame.line_num}")
                break
    return tuple(dict.fromkeys(lines))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def casts_in_jaxpr(jaxpr: Any) -> int:
    """How many equations of a jaxpr, inner ones included, change a dtype."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype
        for eqn in equations(jaxpr)
    )


def casts_in_hlo(text: str) -> int:
    """How many instructions of an HLO text change a dtype, fused ones included."""
    return len(re.findall(r" = \S+ convert\(", text))
