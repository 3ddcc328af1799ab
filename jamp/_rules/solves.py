"""custom_linear_solve: its programs are rewritten; what passes between them is not."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from jamp import _dtypes
from jamp._rules.programs import Rewritten, note, rewrite
from jamp._rules.site import Site
from jamp._values import Value


def run_linear_solve(site: Site) -> list[Value]:
    """Runs a linear solve; right sides and solutions keep the dtypes as traced."""
    lengths, programs = site.eqn.params["const_lengths"], site.eqn.params["jaxprs"]
    ends = list(accumulate(lengths))
    sides = [
        site.emitter.converted(value, _dtypes.dtype_of(var))
        if value.eligible
        else value
        for value, var in zip(site.operands, site.eqn.invars, strict=True)
    ][ends[-1] :]
    inner: list[Rewritten] = []
    rewritten: list[Any] = []
    for program, end, length in zip(programs, ends, lengths, strict=True):
        if program is None:
            rewritten.append(None)
            continue
        consts = site.operands[end - length : end]
        inner.append(rewrite(site, program, [*consts, *sides]))
        dtypes = [_dtypes.dtype_of(var) for var in program.jaxpr.outvars]
        rewritten.append(inner[-1].giving(dtypes, site.emitter.record))
    note(site, *inner)
    arrays = [value.array for value in (*site.operands[: ends[-1]], *sides)]
    results = site.bind(arrays, jaxprs=type(programs)(*rewritten))
    return [Value.of(array) for array in results]
