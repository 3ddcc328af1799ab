"""What becomes of a value that a program takes in float32: is it rounded at once?"""

from collections.abc import Sequence

from jamp._dtypes import LOW_DTYPES
from jamp._equations.walks import nested
from jamp._plan.plan import Action, Bind, Broadcast, Cast, Plan, Structural
from jamp._plan.values import Values
from jamp._primitives import COMPARISONS, EXACT

# Rounded before or after these, numbers are the same.
_ROUNDED_ALIKE = EXACT - {"sign"}
# Their results are as near if their operand is rounded as if they are themselves, and
# finite where that is infinite.
_SATURATING = frozenset({"erf", "logistic", "tanh"})


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
        if not places or _bears_rounding(action):
            continue
        if _moves(action):
            same.update(value.number for value in action.results)
        elif not isinstance(action, Structural) or _hands_on(action, places):
            return True
    return any(value.number in same for value in wanted)


def _bears_rounding(action: Action) -> bool:
    """Whether an action rounds, or makes the same of what is rounded.

    It makes the same where it compares with zero, as the gradient of relu does.
    """
    if not isinstance(action, Bind):
        return isinstance(action, Cast) and action.dtype in LOW_DTYPES
    if action.eqn.primitive.name in COMPARISONS:
        return any(value.constant == 0 for value in action.operands)
    return action.eqn.primitive.name in _SATURATING


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
