"""The operations of a program, read from the records of its plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._plan.programs import STRUCTURAL
from jamp._plan.records import Origin, Record
from jamp._policy.policy import Policy
from jamp._policy.rules import Rule
from jamp._tracing.locations import (
    Listed,
    Location,
    frame_key,
    library_location,
    location,
)
from jamp._tracing.regions import modules

# What has a rule by its own entry in the policy.
_ENTRIES = {Origin.SCOPE, Origin.FUNCTION, Origin.PRIMITIVE}
# What calls programs, which count in its place.
_COUNTED_INSIDE = STRUCTURAL.keys() - _primitives.COLLECTIVES


@dataclass(frozen=True)
class Operation:
    record: Record  # what was decided for it
    times: int  # the product of the lengths of the scans that it stands in
    location: Location | None  # the user's line
    library: Location | None  # the line of a library, such as Flax, that it led to
    scope: tuple[str, ...]  # the modules that it stands in
    path: tuple[str, ...]  # the same, or the user's function if it stands in none
    function: str | None  # the listed function that it is part of, whatever decided
    entry: str  # that, or the primitive
    decided: bool  # whether anything was
    reason: str  # where its rule comes from, or why the rule changes nothing
    why: str  # the rule and the reason
    # Of a matmul's operands, or else of the results, but for scalars.
    shapes: tuple[tuple[object, ...], ...]
    flops: float  # of matmuls and convolutions only
    result_bytes: Counter[str]  # by dtype; none of a call, whose program counts
    cast_bytes: int  # what the conversions inserted for it read and write


def operations(records: Iterable[Record], policy: Policy) -> Iterator[Operation]:
    """The operations of records, and of the programs that these hold."""
    return _operations(records, Listed(policy.function_codes), None, 1)


def _operations(
    records: Iterable[Record],
    listed: Listed,
    caller: JaxprEqn | None,
    times: int,
) -> Iterator[Operation]:
    for record in records:
        yield _operation(replace(record, caller=caller), listed, times)
        outer = record.eqn if location(record.eqn) else caller
        for inner in record.inner:
            yield from _operations(inner, listed, outer, times * _repeats(record.eqn))


def _operation(record: Record, listed: Listed, times: int) -> Operation:
    eqn, ruling, line = record.eqn, record.ruling, record.location
    led = eqn if location(eqn) else record.caller
    scope = modules(record.scope)
    function = ruling.function
    if ruling.origin in (Origin.SCOPE, Origin.REGION):
        key = frame_key(eqn)
        found = listed.calls(key) if key else iter(())
        function = next((call.function for call in found), None)
    call = record.primitive in _COUNTED_INSIDE
    reason, why = ruling.source, f"{ruling.rule.value}: {ruling.source}"
    uncast = [d for d in record.operands[:2] if not _dtypes.eligible(d)]
    if ruling.rule is Rule.LOWER and record.is_product and uncast:
        # As complex numbers.
        reason = why = f"{uncast[0]} is not cast"
    elif ruling.rule is Rule.AS_TRACED and ruling.origin not in _ENTRIES:
        why = reason
    atoms = eqn.invars if record.is_product else eqn.outvars
    result_bytes: Counter[str] = Counter()
    if not call and record.primitive != "convert_element_type":
        for var, dtype in zip(eqn.outvars, record.results, strict=True):
            if hasattr(dtype, "itemsize"):
                size = _dtypes.known_size(_dtypes.shape_of(var)) * dtype.itemsize
                result_bytes[str(dtype)] += size * times
    return Operation(
        record,
        times,
        line,
        library_location(led, function) if led else None,
        scope,
        path=scope or ((f"{line.function}()",) if line else ()),
        function=function.name if function else None,
        entry=function.name if function else record.primitive,
        decided=not call
        or bool(record.casts)
        or function is not None
        or is_opaque(record),
        reason=reason,
        why=why,
        shapes=tuple(filter(None, map(_dtypes.shape_of, atoms))),
        flops=record.flops * times,
        result_bytes=result_bytes,
        cast_bytes=times
        * sum(
            _dtypes.known_size(cast.shape)
            * (cast.source.itemsize + cast.target.itemsize)
            for cast in record.casts
        ),
    )


def is_opaque(record: Record) -> bool:
    """Whether it is of a call of a program that autocast could not enter."""
    return record.ruling.origin is Origin.OPAQUE and record.primitive in STRUCTURAL


def counted(records: Iterable[Record]) -> str:
    """The primitives of records, and how many there are of each."""
    names = Counter(record.primitive for record in records)
    return ", ".join(f"{name} ({names[name]})" for name in sorted(names))


def _repeats(eqn: JaxprEqn) -> int:
    """How often the program that an equation holds runs, as far as can be told."""
    if eqn.primitive.name == "scan":
        length = eqn.params["length"]
        return length if isinstance(length, int) else 1  # of symbolic shapes
    if eqn.primitive.name == "shard_map":
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
    return 1
