"""Probabilities that have been rounded, and what must not read them."""

from collections.abc import Callable, Iterable

from jamp._errors import BannedOpError
from jamp._plan.plan import Action, Run, Structural
from jamp._plan.records import Record, with_inner
from jamp._plan.unrounded.readers import taken
from jamp._plan.values import Value, Values


class Probabilities:
    """Which probabilities have really been rounded to 16 bits, in a plan being written.

    Args:
      at_hand: whether the float32 that a value was rounded from is there.
    """

    def __init__(self, at_hand: Callable[[Value], bool]):
        self._at_hand = at_hand
        self._rounded: set[int] = set()

    def rounded(self, value: Value) -> bool:
        if value.traits.rounded_to is None:
            return False
        return value.number in self._rounded or (value.low and not self._at_hand(value))

    def places(self, values: Values) -> frozenset[int]:
        """Which of some values are rounded probabilities."""
        return frozenset(p for p, value in enumerate(values) if self.rounded(value))

    def add(self, values: Values, places: Iterable[int]) -> None:
        """Notes that some among values, if probabilities, were rounded elsewhere."""
        self._rounded.update(values[place].number for place in places)

    def look_inside(self, action: Run) -> None:
        """Looks at what a called function holds that runs in float32 as a whole.

        Raises:
          BannedOpError: it may not take a rounded one.
        """
        called = isinstance(action, Structural) and action.is_call
        if called and any(map(self.rounded, taken(action))):
            _refuse(with_inner([action.caster.record]))

    def trace(self, action: Action) -> None:
        """Notes what an action that has been written makes of those that it takes.

        Raises:
          BannedOpError: it may not take a rounded one.
        """
        reads = any(map(self.rounded, taken(action)))
        if reads and isinstance(action, Run):
            _refuse([action.caster.record])
        # Of what loops and branches do inside nothing is known here.
        if reads or (isinstance(action, Structural) and not action.is_call):
            self._rounded.update(value.number for value in action.results)


def _refuse(records: Iterable[Record]) -> None:
    for record in records:
        if record.unsafe:
            raise BannedOpError(record.unsafe)
