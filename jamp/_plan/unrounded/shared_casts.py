"""Casts to float32 that share their gradient, which is rounded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jamp._compat import scan_counts
from jamp._dtypes import FLOAT32
from jamp._plan.plan import Action, Cast, Float32Call, Plan, Structural
from jamp._plan.values import Value


def with_shared_casts(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions, where those that widen the same 16 bits share the gradient of one cast.

    Their gradients are then added up in float32, and rounded once.
    """
    counts: Counter[int] = Counter()
    casts: dict[int, Cast] = {}
    widened = [widened_by(action) for action in actions]
    for action, places in zip(actions, widened, strict=True):
        if isinstance(action, Cast) and action.dtype == FLOAT32:
            casts[action.operands[0].number] = action
            counts[action.operands[0].number] += 1
        else:
            counts.update({action.operands[place].number for place in places})
    made: set[int] = set()
    for action, places in zip(actions, widened, strict=True):
        taken = action.operands
        shared = [place for place in places if counts[taken[place].number] > 1]
        if shared and isinstance(action, Float32Call | Structural):
            for value in (taken[place] for place in shared):
                if value.number not in casts:
                    wide = Value.of(value.aval, FLOAT32)
                    casts[value.number] = Cast((value,), (wide,), action.caster)
                if value.number not in made:
                    made.add(value.number)
                    yield casts[value.number]
            wides = [casts[taken[place].number].results[0] for place in shared]
            action = replace(action, operands=[*taken, *wides], shared=shared)
        elif isinstance(action, Cast):
            number = action.operands[0].number
            if casts.get(number) is action:
                if number in made:
                    continue
                made.add(number)
        yield action


def widened_by(action: Action) -> Sequence[int]:
    """The places of 16-bit operands that an action reads in float32.

    It may be handed casts of these after its operands, for their gradients to go to.
    """
    if isinstance(action, Float32Call):
        return [place for place, v in enumerate(action.operands) if v.low]
    if isinstance(action, Cast):
        return [0] if action.operands[0].low and action.dtype == FLOAT32 else []
    if not isinstance(action, Structural) or action.context.linear:
        return []
    places, first = _handed_in(action), action.kind == "cond"
    inside = [_widened_in(plan) for plan in action.plans] if places else []
    return [
        place
        for place in places
        if action.operands[place].low
        and any(place - first in widened for widened in inside)
    ]


def _handed_in(action: Structural) -> Sequence[int]:
    """The places of operands that the programs of an action take as they are."""
    params, count = action.eqn.params, len(action.eqn.invars)
    if action.kind == "scan":
        consts, carry = scan_counts(params)
        return [*range(consts), *range(consts + carry, count)]
    if action.kind == "cond":
        return range(1, count)
    whole = action.kind in ("jit", "shard_map") or (
        # The backward half of another is one program for JAX, and stays so.
        action.kind == "remat2" and not params["differentiated"]
    )
    return range(count) if whole else ()


def _widened_in(plan: Plan) -> set[int]:
    """The places of inputs that the actions of a program read in float32."""
    read = {
        action.operands[place].number
        for action in plan.actions
        for place in widened_by(action)
    }
    return {place for place, value in enumerate(plan.inputs) if value.number in read}
