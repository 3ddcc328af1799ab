"""Inner programs: rewritten once for each combination of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jamp._dtypes import DType
from jamp._emit import Scribe
from jamp._records import Cast, Entry, Group, Record
from jamp._rules.site import Site
from jamp._values import Traits, Value


@dataclass(frozen=True)
class Rewritten:
    """An inner program, rewritten for inputs of certain dtypes and traits.

    Attributes:
      program: the new closed jaxpr.
      extras: (input, dtype) pairs: casts of inputs that it takes as further inputs.
      traits: what is known of its results.
      entries: records of its equations.
      changed: whether it differs from the program as traced.
    """

    program: Any
    extras: tuple[tuple[int, DType], ...]
    traits: tuple[Traits, ...]
    entries: list[Entry]
    changed: bool

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """Dtypes of its results."""
        return tuple(getattr(a, "dtype", None) for a in self.program.out_avals)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs it on its inputs and extras."""
        return list(jaxpr_as_fun(self.program)(*arrays))

    def giving(self, dtypes: Sequence[Any], record: Record) -> Any:
        """Its program with the results cast to dtypes, which are noted in a record."""
        if list(self.dtypes) == list(dtypes):
            return self.program
        self.note_casts(dtypes, record)
        return jax.make_jaxpr(lambda *arrays: cast_to(self(*arrays), dtypes))(
            *self.program.in_avals
        )

    def note_casts(self, dtypes: Sequence[Any], record: Record) -> None:
        """Notes casts of its first results to dtypes."""
        record.casts += [
            Cast(aval.dtype, dtype, aval.shape)
            for aval, dtype in zip(self.program.out_avals, dtypes, strict=False)
            if getattr(aval, "dtype", None) != dtype
        ]


def rewrite(
    site: Site,
    program: Any,
    operands: Sequence[Value],
    *,
    hoisted: Iterable[int] = (),
) -> Rewritten:
    """Rewrites an inner program, once for each combination of inputs.

    Args:
      site: the equation that holds it.
      program: the closed jaxpr as traced.
      operands: the inputs; only their dtypes and traits matter.
      hoisted: inputs whose narrowing casts are left to the caller, so that a value
        that enters several programs, or a loop, is cast once.
    """
    known = tuple((value.aval, value.traits) for value in operands)
    slots = tuple(hoisted)
    key = (id(program), known, site.context, slots)
    cache = site.interpreter.cache
    if key not in cache:
        rewritten = _rewrite(site, program, operands, slots, ())
        # The cache holds the program too, so that its id stays taken.
        cache[key] = (rewritten, program)
    found: Rewritten = cache[key][0]
    return found


def _rewrite(
    site: Site,
    program: Any,
    operands: Sequence[Value],
    hoisted: tuple[int, ...],
    extras: tuple[tuple[int, DType], ...],
) -> Rewritten:
    scribe = Scribe()
    traits: list[Traits] = []
    count = len(operands)

    def run(*arrays: Any) -> list[Any]:
        values = [
            Value(array, outer.aval, outer.traits, slot if slot in hoisted else None)
            for slot, (array, outer) in enumerate(
                zip(arrays[:count], operands, strict=True)
            )
        ]
        for (slot, dtype), array in zip(extras, arrays[count:], strict=True):
            values[slot].casts[dtype] = array
        results = site.interpreter.run(program, values, site.context, scribe)
        traits[:] = [result.traits for result in results]
        return [result.array for result in results]

    avals = [value.aval for value in operands]
    narrowed = [avals[slot].update(dtype=dtype) for slot, dtype in extras]
    rewritten = jax.make_jaxpr(run)(*avals, *narrowed)
    requests = tuple(sorted(scribe.requests, key=lambda r: (r[0], r[1].name)))
    if requests and not extras:
        return _rewrite(site, program, operands, hoisted, requests)
    # What comes in narrower may go out again without any equation having changed.
    changed = scribe.changed or any(
        value.dtype != getattr(aval, "dtype", None)
        for value, aval in zip(operands, program.in_avals, strict=True)
    )
    return Rewritten(rewritten, extras, tuple(traits), scribe.entries, changed)


def cast_to(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Arrays in dtypes; None leaves one as it is."""
    return [
        array
        if dtype is None or array.dtype == dtype
        else jax.lax.convert_element_type(array, dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def closed(program: Any) -> Any:
    """A program that an equation holds without constants, as a closed one."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def note(site: Site, *programs: Rewritten) -> None:
    """Records inner programs under their equation."""
    scribe = site.emitter.scribe
    site.emitter.record.operands = tuple([v.dtype for v in site.operands])
    for program in programs:
        scribe.entries.append(Group(site.eqn, program.entries))
        scribe.changed |= program.changed


def to_values(arrays: Sequence[Any], traits: Sequence[Traits]) -> list[Value]:
    """Values of arrays about which something is known."""
    values = []
    for array, known in zip(arrays, traits, strict=True):
        value = Value.of(array)
        value.traits = known
        values.append(value)
    return values
