"""What becomes of a value that a program takes in float32: is it rounded at once?"""

from collections.abc import Sequence

from jamp._dtypes import LOW_DTYPES
from jamp._equations import nested
from jamp._plan.plan import Action, Bind, Broadcast, Cast, Plan, Structural
from jamp._plan.values import Values
from jamp._primitives import COMPARISONS, EXACT

# Rounded before or after these, numbers are the same.
_ROUNDED_ALIKE = EXACT - {"sign"}


def reads_unrounded(plan: Plan, place: int, wanted: Values) -> bool:
    """Whether a program reads an input as it comes, and not its 16 bits alone.

    Args:
      plan: that of the program.
      place: that of the input.
      wanted: those of its results that are wanted as they are.
    """
    same = {plan.inputs[place].number}
    for action in plan.actions:
        places = [p for p, v in enumerate(action.operands) if v.number in same]
        if not places or _rounds(action) or _asks_sign(action):
            continue
        if _moves(action):
            same.update(value.number for value in action.results)
        elif not isinstance(action, Structural) or _hands_on(action, places):
            return True
    return any(value.number in same for value in wanted)


def _rounds(action: Action) -> bool:
    return isinstance(action, Cast) and action.dtype in LOW_DTYPES


def _asks_sign(action: Action) -> bool:
    """Whether an action compares with zero, as the gradient of relu does."""
    return (
        isinstance(action, Bind)
        and action.eqn.primitive.name in COMPARISONS
        and any(value.constant == 0 for value in action.operands)
    )


def _moves(action: Action) -> bool:
    if not isinstance(action, Bind):
        return isinstance(action, Broadcast)
    return {eqn.primitive.name for eqn in nested([action.eqn])} <= _ROUNDED_ALIKE


def _hands_on(action: Structural, places: Sequence[int]) -> bool:
    """Whether a program of an action reads an operand at such a place unrounded."""
    first = action.first_handed_in
    return any(
        place not in action.handed_in
        or reads_unrounded(plan, place - first, plan.results)
        for place in places
        for plan in action.plans
    )
