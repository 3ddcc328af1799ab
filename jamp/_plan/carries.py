"""What a loop carries: the dtypes at which it stays what it is, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jamp import _dtypes
from jamp._dtypes import FLOAT32
from jamp._plan.plan import Plan
from jamp._plan.values import Traits, Value, Values


def settled_carry(
    carry: Values, body: Callable[[Values], Plan]
) -> tuple[Plan, list[Any], bool]:
    """Finds the dtypes at which a loop's carry stays what it is; whether it changes.

    They are those that iterating one by one would come to, from the dtypes that come
    in; where it would go back and forth, the widest.
    """
    seen = [[value.dtype for value in carry]]
    while True:
        dtypes = seen[-1]
        inner = body(carry_in(carry, dtypes))
        after: list[Any] = list(inner.dtypes[: len(carry)])
        if after in seen[:-1] or len(seen) > len(carry) + 1:
            after = [meet(options) for options in zip(dtypes, after, strict=True)]
        if after == dtypes:
            inner, dtypes = _keep_sums(carry, body, inner, dtypes)
            return inner, dtypes, dtypes != seen[0]
        seen.append(after)


def _keep_sums(
    carry: Values, body: Callable[[Values], Plan], inner: Plan, dtypes: list[Any]
) -> tuple[Plan, list[Any]]:
    """Keeps a loop's sum, as `total += x @ w`, in float32; its readers see 16 bits."""
    sums = [dtype if dtype in _dtypes.LOW_DTYPES else None for dtype in dtypes]
    added = [False] * len(sums)
    while any(sums):
        kept = [FLOAT32 if low else own for low, own in zip(sums, dtypes, strict=True)]
        marks = zip(carry_in(carry, kept), sums, added, strict=True)
        trial = body([v.knowing(sums=low, added=adds) for v, low, adds in marks])
        found = [value.kept for value in trial.results[: len(carry)]]
        if all(v.adds for v, low in zip(found, sums, strict=True) if low):
            trial.results = [*found, *trial.results[len(carry) :]]
            return trial, kept
        handed_on = [v.is_kept for v in found]
        adds = [v.adds or known for v, known in zip(found, added, strict=True)]
        if not all(v for v, low in zip(handed_on, sums, strict=True) if low):
            sums, added = _where(handed_on, sums), [False] * len(sums)
        elif adds != added:
            # What the loop adds to may go on in the place of another.
            added = adds
        else:
            sums, added = _where(adds, sums), [False] * len(sums)
    return inner, dtypes


def _where(chosen: Sequence[bool], sums: Sequence[Any]) -> list[Any]:
    return [low if is_sum else None for is_sum, low in zip(chosen, sums, strict=True)]


def carry_in(carry: Values, dtypes: Sequence[Any]) -> list[Value]:
    """What an iteration finds of a carry, of which nothing else is known."""
    pairs = zip(carry, dtypes, strict=True)
    return [Value.of(value.aval, dtype, Traits(data=True)) for value, dtype in pairs]


def carried_on(value: Value) -> Traits:
    """What is known of what a loop carries when it has run."""
    known = value.traits
    return handed_on(value, sums=known.sums, added=known.added)


def handed_on(value: Value, **traits: Any) -> Traits:
    """What is known of a value that enters a program in parts, or leaves a loop."""
    known = value.traits
    return Traits(probability=known.probability, rounded=known.rounded, **traits)


def meet(dtypes: Sequence[Any]) -> Any:
    """The dtype in which results of several programs leave as one."""
    floats = [dtype for dtype in dtypes if dtype is not None]
    if floats and all(map(_dtypes.eligible, floats)):
        return _dtypes.widest(floats)
    return dtypes[0]
