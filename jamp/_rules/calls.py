"""jit: the inner program is rewritten, the call stays what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend.core import JaxprEqn

from jamp._emit import Emitter
from jamp._rules.programs import note, rewrite, to_values
from jamp._values import Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Interpreter


def run_jit(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    context: Context,
    emitter: Emitter,
) -> list[Value]:
    """Runs a jitted function; it keeps its name, donation, inlining and shardings."""
    program = eqn.params["jaxpr"]
    slots = range(len(operands))
    inner = rewrite(interpreter, program, operands, context, hoisted=slots)
    note(eqn, emitter, operands, inner)
    arrays = [value.array for value in operands]
    params = dict(eqn.params)
    if inner.changed:
        arrays += [emitter.cast(operands[slot], dtype) for slot, dtype in inner.extras]
        params["jaxpr"] = inner.program
        # Every parameter that holds an entry per input needs one for the casts too.
        for name in ("in_shardings", "in_layouts"):
            entries = params[name]
            params[name] = (*entries, *(entries[slot] for slot, _ in inner.extras))
        donated = params["donated_invars"]
        params["donated_invars"] = (*donated, *(False for _ in inner.extras))
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(params))
    return to_values(results, inner.traits)
