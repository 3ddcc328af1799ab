"""Programs that run apart, as those of loops, and what crosses into them in float32."""

from __future__ import annotations

from typing import NamedTuple

from jamp._compat import scan_counts
from jamp._plan.plan import Structural


class Apart(NamedTuple):
    """What programs that run apart may be handed, and hand on, in float32."""

    skipped: int  # how many operands come before those of the programs
    inputs: int  # how many of a program's first inputs keep their dtype
    results: int  # how many of its first results
    # How many of the first inputs all iterations share: wide for readers in float32.
    shared: int = 0
    # Whether their gradient, if there is one, is taken elsewhere.
    forward: bool = False


def apart_from(action: Structural) -> Apart | None:
    """What may go between a program and its gradient that run apart; None if nothing.

    What a loop carries stays as it is. Where the gradient is not taken inside, programs
    hand on 16 bits.
    """
    params, forward = action.eqn.params, not action.context.derived
    if action.kind == "scan":
        consts, carry = scan_counts(params)
        return Apart(0, consts + carry, carry, shared=consts, forward=forward)
    if forward:
        skipped = {"cond": 1, "remat2": 0}.get(action.kind)
        return None if skipped is None else Apart(skipped, 0, 0, forward=True)
    # Without a policy a checkpoint saves its inputs alone: only cotangents may cross it
    # in float32.
    if action.kind == "remat2" and params["policy"] is None:
        cotangents = Apart(0, len(action.operands), 0)
        return cotangents if action.context.transposed else None
    whole = Apart(0, 0, 0)
    others = {"cond": Apart(1, 0, 0), "shard_map": whole, "remat2": whole}
    return others.get(action.kind)
