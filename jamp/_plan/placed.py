"""Where equations stand, and which of them stand in one call of a listed function.

The frames of an iteration in a function are those of a call of it in a loop. What goes
on from one to the next tells them apart, as far as that is needed.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp._equations.walks import read_by
from jamp._plan.equation import Environment
from jamp._plan.records import Ruling
from jamp._policy.rules import Rule
from jamp._tracing.locations import Call, FrameKey
from jamp._tracing.regions import Scope


class Placed(NamedTuple):
    """An equation, and the scope, region and call of a listed function around it."""

    eqn: JaxprEqn
    scope: Scope
    user: Ruling | None = None
    call: Call | None = None
    key: FrameKey | None = None

    @property
    def rounds(self) -> bool:
        """Whether its function computes in float32, and rounds what it returns."""
        rules = self.scope.options.policy.function_rules
        return self.call is not None and (
            rules[self.call.function] is Rule.INTERNAL_FLOAT32
        )


# Consecutive equations of a program.
Group = list[Placed]


def by_call(placed: Sequence[Placed], start: int, env: Environment) -> Iterator[Group]:
    """Groups equations by the call of a listed function that they stand in.

    Args:
      placed: the equations.
      start: the number of the first of them in its program.
      env: the values of the program.
    """
    run: Group = []
    for one in placed:
        if run and not _in_one_function(run[0], one):
            start += len(run)
            yield from _calls(run, start, env)
            run = []
        run.append(one)
    if run:
        yield from _calls(run, start + len(run), env)


def _in_one_function(first: Placed, one: Placed) -> bool:
    """Whether two equations have the same frames from a listed function on."""
    if one.call is None or first.call is None or one.call.key != first.call.key:
        return False
    return one.scope is first.scope or one.scope == first.scope


def _calls(run: Group, stop: int, env: Environment) -> Iterator[Group]:
    """The calls that equations of one function stand in; `stop` is behind them.

    Of a function that rounds what it returns, those are one of which the later ones
    alone read what the first hand on: it may never have been returned.
    """
    pieces = _pieces(run) if len(run) > 1 else [run]
    if len(pieces) == 1 or not run[0].rounds:
        yield from pieces
        return
    last: dict[Any, int] = {}
    for number, piece in enumerate(pieces):
        last |= dict.fromkeys(
            (var for one in piece for var in read_by(one.eqn)), number
        )
    group: Group = []
    handed_on: set[Any] = set()
    for number, piece in enumerate(pieces):
        handed_on = {var for var in handed_on if last.get(var, 0) >= number}
        returned = any(env.used_from(var, stop) for var in handed_on)
        if group and (returned or not handed_on):
            yield group
            group, handed_on = [], set()
        group += piece
        handed_on.update(var for one in piece for var in one.eqn.outvars)
    yield group


def _pieces(run: Group) -> list[Group]:
    """Equations of one function, cut where they are back at the first instruction."""
    key = run[0].key
    # What a jitted function inlines has one and the same frames throughout.
    cuts = [
        place
        for place, (before, one) in enumerate(pairwise(run), 1)
        if one.key == key != before.key
    ]
    return [run[a:b] for a, b in pairwise([0, *cuts, len(run)])]
