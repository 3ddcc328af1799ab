"""Records of a plan that is written anew: its casts, and what leaves in float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from jamp._dtypes import FLOAT32, LOW_DTYPES
from jamp._plan.plan import (
    Action,
    Bind,
    Cast,
    Float32Call,
    Plan,
    Run,
    Structural,
    operands_read,
)
from jamp._plan.records import Conversion, Note, Record, Returned
from jamp._plan.unrounded.groups import Group
from jamp._plan.unrounded.kinds import is_float32_function
from jamp._plan.values import Value, Values

_READ = "read in float32"
_TAKES = Note("reads what was not rounded")
_WHOLE = Note("its function runs in float32")


class Rewritten:
    """The records of a plan that is being written.

    Args:
      records: those of the plan as it was.
      wide: the float32 that 16-bit values were rounded from, by the numbers of these.
      readers: the names of what reads a 16-bit value in float32, by its number.
    """

    def __init__(
        self,
        records: Iterable[Record],
        wide: Mapping[int, Value],
        readers: Callable[[int], Iterable[str]],
    ):
        self._records = {id(r): replace(r, casts=[*r.casts]) for r in records}
        self._wide = wide
        self._readers = readers
        # Why equations run in float32 calls, by the ids of their records.
        self._in_calls: dict[int, Note] = {}
        # What float32 calls compute that only they read, by number.
        self._made_in_calls: set[int] = set()

    def put_in_call(self, action: Run) -> None:
        """Notes that an action runs in a float32 call."""
        whole = is_float32_function(action)
        self._in_calls[id(action.caster.record)] = _WHOLE if whole else _TAKES

    def view(self, value: Value) -> None:
        """Notes that a float32 call reads a value that it computes itself."""
        self._made_in_calls.add(value.number)

    def hold(self, action: Run, plans: Iterable[Plan]) -> None:
        """Notes which programs an action holds by now."""
        record = self._records[id(action.caster.record)]
        plans = [*plans]
        record.inner = [plan.records for plan in plans]
        # What a program without equations casts has no record of its own.
        for plan in plans:
            if not plan.records:
                record.casts += map(_conversion, _all_casts(plan.actions))

    def call(self, action: Structural, operands: Values, results: Values) -> None:
        """Notes what an action takes and gives by now."""
        record = self._records[id(action.caster.record)]
        # Casts of its operands, which it takes too, come last.
        taken = operands[: len(record.operands)]
        record.operands, record.results = _dtypes_of(taken), _dtypes_of(results)

    def finish(
        self, actions: Collection[Action], results: Values, groups: Iterable[Group]
    ) -> list[Record]:
        """The records, once all is written; of the groups some may not be read."""
        self._note_casts(actions)
        self._made_in_calls.update(_read_in_calls(groups))
        read = self._read(actions, results) | self._made_in_calls
        bound = (a for a in actions if isinstance(a, Bind | Structural))
        kept = {value.number for action in bound for value in action.results}
        pairs = self._records.items()
        return [self._finished(key, record, read, kept) for key, record in pairs]

    def _finished(
        self, key: int, record: Record, read: set[int], kept: set[int]
    ) -> Record:
        returns = tuple(
            [found and self._leaving(found, read) for found in record.returns]
        )
        numbers = [r.number for r in returns if r and FLOAT32 in r.dtypes]
        unrounded = [number for number in numbers if number in self._wide]
        note = self._in_calls.get(key)
        if unrounded:
            names = chain.from_iterable(map(self._readers, unrounded))
            note = Note(_READ, tuple(dict.fromkeys(names)))
        record.returns = returns
        # Of one that moves 16 bits there may be two.
        if key in self._in_calls and not any(r and r.number in kept for r in returns):
            return _in_float32(record, note)
        if unrounded:
            results = zip(record.results, returns, strict=True)
            wide = [FLOAT32 if r and r.dtypes == (FLOAT32,) else d for d, r in results]
            record.results, record.note = tuple(wide), note
        return record

    def _leaving(self, found: Returned, read: Collection[int]) -> Returned:
        """A result, with the dtypes in which it is read now; as it was if in none."""
        if found.number not in self._wide:
            return found
        numbers = {
            found.number: found.dtypes,
            self._wide[found.number].number: (FLOAT32,),
        }
        dtypes = [d for number in numbers if number in read for d in numbers[number]]
        return found._replace(dtypes=tuple(dtypes)) if dtypes else found

    def _read(self, actions: Iterable[Action], results: Values) -> set[int]:
        """The numbers of what is read, other than to be rounded by a rule."""
        read = {value.number for value in results}
        for action in actions:
            numbers = {value.number for value in operands_read(action)}
            if isinstance(action, Cast):
                wide = self._wide.get(action.results[0].number)
                numbers -= {wide.number} if wide else set()
            read |= numbers
        return read

    def _note_casts(self, actions: Iterable[Action]) -> None:
        # What is cast for no equation counts with the first.
        first = next(iter(self._records), None)
        for made in reversed([*_all_casts(actions)]):
            key = id(made.caster.record) if made.caster else first
            if key is not None:
                self._records[key].casts.insert(0, _conversion(made))


def _conversion(cast: Cast) -> Conversion:
    value = cast.operands[0]
    return Conversion(value.dtype, cast.dtype, value.aval.shape)


def _all_casts(actions: Iterable[Action]) -> Iterator[Cast]:
    return chain.from_iterable(map(_casts, actions))


def _casts(action: Action) -> Iterator[Cast]:
    """The casts that an action makes."""
    if isinstance(action, Cast):
        yield action
    elif isinstance(action, Float32Call):
        yield from reversed([cast for cast in action.narrowed if cast])
        for value in action.operands:
            if value.low:
                wide = Value.of(value.aval, FLOAT32)
                yield Cast((value,), (wide,), action.caster)


def _read_in_calls(groups: Iterable[Group]) -> Iterator[int]:
    """The numbers of what groups make and read themselves."""
    for group in groups:
        read = {id(var) for eqn in group.eqns for var in eqn.invars}
        yield from (n for n, (var, _) in group.made.items() if id(var) in read)


def _in_float32(record: Record, note: Note | None) -> Record:
    """The record of an equation that runs in float32, for a reason."""
    inner = [
        [_in_float32(replace(r, returns=_all_wide(r)), note) for r in records]
        for records in record.inner
    ]
    operands, results = map(_widened, (record.operands, record.results))
    if (operands, results) == (record.operands, record.results):
        return replace(record, inner=inner)
    return replace(record, operands=operands, results=results, inner=inner, note=note)


def _all_wide(record: Record) -> tuple[Returned | None, ...]:
    """What a record returns, all of it in float32."""
    return tuple([r and r._replace(dtypes=_widened(r.dtypes)) for r in record.returns])


def _widened(dtypes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple([FLOAT32 if dtype in LOW_DTYPES else dtype for dtype in dtypes])


def _dtypes_of(values: Values) -> tuple[Any, ...]:
    return tuple([value.dtype for value in values])
