"""What in a report needs attention: matmuls not lowered, operations not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jamp._explain.operations import Counted
from jamp._explain.rows import share
from jamp._plan.records import Origin
from jamp._policy.policy import Policy, entries
from jamp._policy.rules import BUILTIN, Rule


class PolicyEntry(NamedTuple):
    """One entry of a policy.

    Attributes:
      kind: `'primitive'`, `'function'` or `'scope'`.
      name: its name or pattern.
      rule: its rule.
      added: whether it is not in the policy of jamp's that has most of its entries.
    """

    kind: str
    name: str
    rule: Rule
    added: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.rule.value})"


def unused_entries(policy: Policy, program: Counted) -> tuple[PolicyEntry, ...]:
    """Entries of a policy that decided about no operation of a program."""
    rulings = [op.record.ruling for op in program.operations]
    functions = {op.function for op in program.operations}
    others = {(r.origin, r.entry) for r in rulings if r.policy == policy.name}

    def used(kind: str, name: str) -> bool:
        return (
            name in functions if kind == "function" else (Origin(kind), name) in others
        )

    own = set(entries(policy))
    added = min((own - set(entries(Policy.load(b))) for b in BUILTIN), key=len)
    return tuple(
        PolicyEntry(*entry, added=entry in added)
        for entry in entries(policy)
        if not used(*entry[:2])
    )


def notices(program: Counted, unused: tuple[PolicyEntry, ...]) -> Iterator[str]:
    """What a reader should know first, the gravest first; see `unused_entries`."""
    matmuls = program.matmuls
    wide = [op for op in matmuls if not op.record.low]
    reasons = ", ".join(sorted({op.reason for op in wide}))
    if wide and len(wide) == len(matmuls):
        yield f"NO MATMUL RUNS IN 16 BITS: {reasons}"
    unknown = Counter(op.record.primitive for op in program.operations if op.unknown)
    if unknown:
        counted = (f"{name} ({count})" for name, count in sorted(unknown.items()))
        listed = ", ".join(counted)
        yield f"ran as traced, because the policy does not know them: {listed}"
    added = ", ".join(str(entry) for entry in unused if entry.added)
    if added:
        yield f"entries added to the policy that decided about nothing: {added}"
    if 0 < len(wide) < len(matmuls):
        yield (
            f"{len(wide)} of {len(matmuls)} matmuls and convolutions "
            f"({share(1 - program.low_flop_share)} of their FLOPs) do not run in 16 "
            f"bits: {reasons}"
        )
