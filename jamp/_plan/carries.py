"""What a loop carries: the dtypes that no iteration changes any more, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jamp import _dtypes
from jamp._dtypes import FLOAT32
from jamp._plan.plan import Plan
from jamp._plan.values import Carried, Traits, Value, Values, inexact


def depth_of(operands: Values) -> int:
    """How many loops stand around one whose operands are sums of these."""
    loops = (origin.loop for v in operands for origin in v.traits.origins)
    return max(loops, default=-1) + 1


class Settled(NamedTuple):
    """What a loop's carry has become.

    Attributes:
      plan: that of the loop's body.
      dtypes: those of the carry, which no iteration changes.
      left: those that an iteration leaves: of a start that stays in float32, 16 bits.
    """

    plan: Plan
    dtypes: list[Any]
    left: list[Any]


def settled_carry(
    carry: Values,
    body: Callable[[Values], Plan],
    depth: int,
    reads: Callable[[Plan, int], bool],
) -> Settled:
    """Finds the dtypes at which a loop's carry stays what it is.

    They are those that iterating one by one would come to, from the dtypes that come
    in; where it would go back and forth, the widest. What comes in float32 and would
    come to 16 bits stays so if it is read before it is overwritten: rounded, it may be
    infinite, or no position any more.

    Args:
      carry: what comes in.
      body: plans an iteration for what it finds.
      depth: how many loops stand around this one whose sums come in.
      reads: whether the first iteration, by its plan, reads a place unrounded.
    """
    settled = _fixed_point(carry, body, depth)
    lossy = [
        place
        for place, (value, dtype) in enumerate(zip(carry, settled.dtypes, strict=True))
        if dtype in _dtypes.LOW_DTYPES
        and value.dtype == FLOAT32
        and (not value.follows or inexact(value, dtype))
    ]
    if not lossy:
        return settled
    first = body(carry_in(carry, [value.dtype for value in carry]))
    wide = [place for place in lossy if reads(first, place)]
    if not wide:
        return settled
    found = _fixed_point(carry, body, depth, wide)
    left = [
        low if place in wide else own
        for place, (low, own) in enumerate(
            zip(found.plan.result_dtypes, found.dtypes, strict=False)
        )
    ]
    return found._replace(left=left)


def _fixed_point(
    carry: Values,
    body: Callable[[Values], Plan],
    depth: int,
    wide: Container[int] = (),
) -> Settled:
    """The plan of a loop's body and its carry's dtypes; those at `wide` are float32."""
    seen = [[value.dtype for value in carry]]
    while True:
        dtypes = seen[-1]
        inner = body(carry_in(carry, dtypes))
        after: list[Any] = [
            FLOAT32 if place in wide else dtype
            for place, dtype in enumerate(inner.result_dtypes[: len(carry)])
        ]
        if after in seen[:-1] or len(seen) > len(carry) + 1:
            after = [meet(options) for options in zip(dtypes, after, strict=True)]
        if after == dtypes:
            inner, dtypes = _keep_sums(carry, body, inner, dtypes, depth)
            return Settled(inner, dtypes, dtypes)
        seen.append(after)


def _keep_sums(
    carry: Values,
    body: Callable[[Values], Plan],
    inner: Plan,
    dtypes: list[Any],
    depth: int,
) -> tuple[Plan, list[Any]]:
    """Keeps a loop's sum, as `total += x @ w`, in float32; its readers see 16 bits."""
    sums = [dtype if dtype in _dtypes.LOW_DTYPES else None for dtype in dtypes]
    while any(sums):
        kept = [FLOAT32 if low else own for low, own in zip(sums, dtypes, strict=True)]
        marks = enumerate(zip(carry_in(carry, kept), sums, strict=True))
        trial = body(
            [
                value.knowing(
                    sum_dtype=low, origins=frozenset({Carried(depth, place, False)})
                )
                for place, (value, low) in marks
            ]
        )
        found = [value.kept for value in trial.results[: len(carry)]]
        added = _added_to(found, depth)
        if all(place in added for place, low in enumerate(sums) if low):
            return replace(trial, results=[*found, *trial.results[len(carry) :]]), kept
        # The others stay in 16 bits, and may take with them what comes from them.
        sums = [low if place in added else None for place, low in enumerate(sums)]
    return inner, dtypes


def _added_to(carried: Values, depth: int) -> set[int]:
    """The places of sums: a loop comes back to them, and adds to them on its way.

    It may do so by way of other places, as where two change places. One to which a sum
    is copied, and that goes into none, is no sum itself, but one of a loop around this
    one may come out of it there.
    """
    ways = _Ways([_own(value, depth) if value.is_kept else [] for value in carried])
    return {
        place
        for place, value in enumerate(carried)
        if (value.is_kept and _of_others(value, depth)) or ways.add(place, place)
    }


class _Ways:
    """How a loop comes from one place in its carry to another, sooner or later.

    Args:
      into: for each place, the origins of what an iteration leaves there.
    """

    def __init__(self, into: Sequence[Iterable[Carried]]) -> None:
        # The places that come to each, and itself.
        self.before = [_before(place, into) for place in range(len(into))]
        self._added = [
            (origin.place, place)
            for place, origins in enumerate(into)
            for origin in origins
            if origin.added
        ]

    def add(self, start: int, end: int) -> bool:
        """Whether it adds something on a way between two places."""
        before = self.before
        return any(start in before[a] and b in before[end] for a, b in self._added)


def _own(value: Value, depth: int) -> list[Carried]:
    """Which of a loop's own carry a value comes from, and not of one around it."""
    return [origin for origin in value.traits.origins if origin.loop == depth]


def _of_others(value: Value, depth: int) -> frozenset[Carried]:
    return value.traits.origins.difference(_own(value, depth))


def _before(place: int, into: Sequence[Iterable[Carried]]) -> set[int]:
    found, new = {place}, [place]
    while new:
        sources = {origin.place for origin in into[new.pop()]} - found
        found |= sources
        new += sources
    return found


def carry_in(carry: Values, dtypes: Sequence[Any]) -> list[Value]:
    """What an iteration finds of a carry, of which nothing else is known."""
    pairs = zip(carry, dtypes, strict=True)
    return [
        Value.of(value.aval, dtype, Traits(activation=True)) for value, dtype in pairs
    ]


def left_by(results: Values, carry: Values, depth: int) -> list[Traits]:
    """What is known of a loop's results when it has run, and began with `carry`.

    After what it carries these are stacks of what its iterations leave.
    """
    ways = _Ways([_own(value, depth) for value in results[: len(carry)]])

    def origins(place: int, value: Value) -> set[Carried]:
        found = {*_of_others(value, depth)}
        carried = place < len(carry)
        ends = [(place, False)] if carried else [o[1:] for o in _own(value, depth)]
        for end, added in ends:
            for start in ways.before[end]:
                around = carry[start].traits.origins | _of_others(results[start], depth)
                adds = added or ways.add(start, end)
                found |= {o._replace(added=o.added or adds) for o in around}
        return found

    return [
        handed_on(value, origins=frozenset(origins(place, value)))
        for place, value in enumerate(results)
    ]


def handed_on(value: Value, **others: Any) -> Traits:
    """What is known of a value that enters a program in parts, or leaves a loop."""
    known = value.traits
    kept = Traits(
        activation=known.activation,
        probability=known.probability,
        rounded_to=known.rounded_to,
        sum_dtype=known.sum_dtype,
        origins=known.origins,
    )
    return kept._replace(**others)


def meet(dtypes: Sequence[Any]) -> Any:
    """The dtype in which results of several programs leave as one."""
    floats = [dtype for dtype in dtypes if dtype is not None]
    if floats and all(map(_dtypes.eligible, floats)):
        return _dtypes.widest(floats)
    return dtypes[0]
