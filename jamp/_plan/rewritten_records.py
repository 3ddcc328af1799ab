"""The records of a plan that is written anew: the casts it makes, what is float32."""

from collections.abc import Iterable
from dataclasses import replace

from jamp import _dtypes
from jamp._dtypes import FLOAT32, DType
from jamp._plan.groups import Group
from jamp._plan.plan import Action, Bind, Cast, Caster, Float32Call, Plan, Structural
from jamp._plan.records import Conversion, Entry, InnerRecords, Record
from jamp._plan.values import Value


class RewrittenRecords:
    """The records of a plan, as they are of the plan as written."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = entries
        self._new = {
            id(record): replace(record, casts=list(record.casts))
            for record in entries
            if isinstance(record, Record)
        }
        self._inner: dict[tuple[int, int], list[Entry]] = {}
        self._float32: set[int] = set()

    def cast_by(self, item: Action | Group, action: Action) -> None:
        """Records the casts that an action makes, the last action first."""
        if isinstance(action, Cast):
            self.cast(action)
        if not isinstance(action, Float32Call) or not isinstance(item, Group):
            return
        for value in reversed(action.operands):
            if value.low:
                self._add(action.caster, value, FLOAT32)
        made = {value.number for value in action.results}
        for value, caster in item.narrowed.values():
            if value.number in made:
                self._add(caster, value, value.dtype, FLOAT32)

    def cast(self, action: Cast) -> None:
        self._add(action.caster, action.operands[0], action.results[0].dtype)

    def _add(
        self,
        caster: Caster | None,
        value: Value,
        target: DType,
        source: DType | None = None,
    ) -> None:
        # What is cast for no equation counts with the first.
        record = next(iter(self._new)) if caster is None else id(caster.record)
        conversion = Conversion(source or value.dtype, target, value.aval.shape)
        self._new[record].casts.insert(0, conversion)

    def take(self, action: Bind | Structural, *, low: bool) -> None:
        """Records that an action computes in float32."""
        if isinstance(action, Structural):
            self._float32.add(id(action.eqn))
        elif low:
            record = action.caster.record
            self._new[id(record)] = _in_float32(self._new[id(record)])

    def replace(self, action: Structural, old: Plan, new: Plan) -> None:
        self._inner[id(action.eqn), id(old.entries)] = new.entries

    def rewritten(self) -> list[Entry]:
        return [self._rewritten(entry) for entry in self._entries]

    def _rewritten(self, entry: Entry) -> Entry:
        wide = id(entry.eqn) in self._float32
        if isinstance(entry, Record):
            new = self._new[id(entry)]
            return _in_float32(new) if wide else new
        inner = self._inner.get((id(entry.eqn), id(entry.entries)), entry.entries)
        return InnerRecords(
            entry.eqn, list(map(_run_in_float32, inner)) if wide else inner
        )


def _run_in_float32(entry: Entry) -> Entry:
    """The records of an equation, and of those inside of it, as run in float32."""
    if isinstance(entry, Record):
        return _in_float32(entry)
    return InnerRecords(entry.eqn, list(map(_run_in_float32, entry.entries)))


def _in_float32(record: Record) -> Record:
    """The record of an equation that runs in float32; its results leave as before."""
    operands, results = (
        tuple(FLOAT32 if dtype in _dtypes.LOW_DTYPES else dtype for dtype in dtypes)
        for dtypes in (record.operands, record.results)
    )
    returns = record.returns or record.results
    return replace(record, operands=operands, results=results, returns=returns)
