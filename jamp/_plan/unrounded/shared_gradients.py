"""Casts to float32 that share their gradient, which is rounded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jamp._dtypes import FLOAT32
from jamp._plan.plan import Action, Cast, Float32Call, Structural
from jamp._plan.values import Value


def with_shared_casts(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions, where those that widen the same 16 bits share the gradient of one cast.

    Their gradients are then added up in float32, and rounded once.
    """
    counts: Counter[int] = Counter()
    casts: dict[int, Cast] = {}
    widened = [action.widens for action in actions]
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
