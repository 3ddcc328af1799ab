"""Which values have elements in common: one that was rounded meets no other of them."""

from collections.abc import Callable, Iterable, Sequence

from jamp import _primitives
from jamp._plan.plan import Action, Bind, Structural
from jamp._plan.unrounded.kinds import Kind
from jamp._plan.values import Value


class Elements:
    """Of 16-bit values, those at hand in float32 whose elements they may have.

    Args:
      kind: what an elementwise action is.
      at_hand: whether the float32 that a value was rounded from is there.
    """

    def __init__(
        self, kind: Callable[[Action], Kind | None], at_hand: Callable[[Value], bool]
    ):
        self._kind = kind
        self._at_hand = at_hand
        # By the numbers of values. Sets of them are masks: one of a long program, in
        # which each value has elements of all before it, takes a bit for each.
        self._known: dict[int, int] = {}
        self._bits: dict[int, int] = {}

    def trace(self, action: Bind | Structural, read: Sequence[Value]) -> None:
        """Notes what the results of an action, which reads some values, come from."""
        found = self._kind(action)
        computes = found is not None and not (found.exact or found.moves)
        if computes or action.eqn.primitive.name in _primitives.PRODUCTS:
            return
        if elements := self._of(read):
            made = [value.number for value in action.results]
            self._known.update(dict.fromkeys(made, elements))

    def mixes(self, read: Sequence[Value]) -> bool:
        """Whether one of some values has elements of another one, but rounded.

        What exceeds its maximum, or differs from itself, would do so by the rounding.
        """
        exact = self._of(filter(self._at_hand, read))
        rounded = [v for v in read if v.low and not self._at_hand(v)]
        return bool(exact & self._of(rounded))

    def _of(self, values: Iterable[Value]) -> int:
        """Values at hand whose elements some values may have, these among them."""
        found = 0
        for value in values:
            found |= self._known.get(value.number, 0)
            if self._at_hand(value):
                found |= self._bits.setdefault(value.number, 1 << len(self._bits))
        return found
