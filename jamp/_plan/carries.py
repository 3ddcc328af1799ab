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
    while any(sums):
        kept = [FLOAT32 if low else own for low, own in zip(sums, dtypes, strict=True)]
        marked = [
            value.knowing(sums=low)
            for value, low in zip(carry_in(carry, kept), sums, strict=True)
        ]
        trial = body(marked)
        found = [value.kept for value in trial.results[: len(carry)]]
        pairs = list(zip(sums, found, strict=True))
        if all(value.adds for low, value in pairs if low):
            trial.results = [*found, *trial.results[len(carry) :]]
            return trial, kept
        sums = [low if value.adds else None for low, value in pairs]
    return inner, dtypes


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
