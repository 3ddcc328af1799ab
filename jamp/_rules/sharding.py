"""shard_map: the body is rewritten; mesh and specs are kept."""

from __future__ import annotations

from typing import Any

import jax

from jamp._emit import Scribe
from jamp._records import Group
from jamp._rules.programs import closed
from jamp._rules.site import Site
from jamp._values import Value


def run_shard_map(site: Site) -> list[Value]:
    """Runs a shard_map; its body is run anew, because it stands on manual axes."""
    interpreter, eqn, operands, context, emitter = site
    params = eqn.params
    scribe = Scribe()

    def body(*shards: Any) -> tuple[Any, ...]:
        values = [Value.of(shard) for shard in shards]
        results = interpreter.run(closed(params["jaxpr"]), values, context, scribe)
        return tuple(result.array for result in results)

    function = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    results = function(*site.arrays)
    emitter.record.operands = tuple([v.dtype for v in operands])
    emitter.scribe.entries.append(Group(eqn, scribe.entries))
    emitter.scribe.changed |= scribe.changed
    return [Value.of(array) for array in results]
