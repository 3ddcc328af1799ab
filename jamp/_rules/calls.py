"""Calls: a jit stays one with its program rewritten; others dissolve into theirs."""

from __future__ import annotations

from jamp._rules.programs import closed, note, rewrite, to_values
from jamp._rules.site import Site
from jamp._values import Value


def run_jit(site: Site) -> list[Value]:
    """Runs a jitted function; it keeps its name, donation, inlining and shardings."""
    slots = range(len(site.operands))
    params = site.eqn.params
    inner = rewrite(site, params["jaxpr"], site.operands, hoisted=slots)
    note(site, inner)
    if not inner.changed:
        return to_values(site.bind(site.arrays), inner.traits)
    extras = [site.emitter.cast(site.operands[s], dtype) for s, dtype in inner.extras]
    # Every parameter that holds an entry per input needs one for the casts too.
    shardings, layouts = (
        (*params[name], *(params[name][slot] for slot, _ in inner.extras))
        for name in ("in_shardings", "in_layouts")
    )
    results = site.bind(
        [*site.arrays, *extras],
        jaxpr=inner.program,
        in_shardings=shardings,
        in_layouts=layouts,
        donated_invars=(*params["donated_invars"], *(False for _ in extras)),
    )
    return to_values(results, inner.traits)


def run_call(site: Site) -> list[Value]:
    """Runs a call that means no more than its program."""
    params = site.eqn.params
    program = closed(params["call_jaxpr" if "call_jaxpr" in params else "fwd_jaxpr"])
    site.emitter.record.operands = tuple([v.dtype for v in site.operands])
    return site.interpreter.run(
        program, site.operands, site.context, site.emitter.scribe
    )
