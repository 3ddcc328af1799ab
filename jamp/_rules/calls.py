"""jit: the inner program is rewritten, the call stays what it is."""

from __future__ import annotations

from jamp._rules.programs import note, rewrite, to_values
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
