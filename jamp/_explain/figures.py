"""The figures of a report, which every form of it shows, and what needs attention."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jamp._explain.operations import Counted, Module, module_of
from jamp._explain.residuals import Residuals
from jamp._plan.records import Origin, Record
from jamp._policy.policy import Policy, entries
from jamp._policy.rules import BUILTIN, Rule
from jamp._tracing.regions import Options


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


@dataclass(frozen=True, repr=False)
class Figures(Counted):
    """What is known of a function under autocast; see `Report`."""

    name: str
    options: Options
    regions: tuple[Options, ...] = ()
    residuals: Residuals | None = None

    @property
    def header(self) -> str:
        """A line on the device type, dtype and policy, and on those of regions."""
        found = dict.fromkeys(map(_words, (self.options, *self.regions)))
        return f"autocast {'; in regions: '.join(found)}"

    @property
    def records(self) -> tuple[Record, ...]:
        """One decision record per equation, those of inner programs included."""
        return tuple(op.record for op in self.operations)

    @property
    def unknown(self) -> tuple[Record, ...]:
        """Equations that ran as traced because the policy does not know them."""
        return tuple(op.record for op in self.operations if op.unknown)

    @cached_property
    def unused(self) -> tuple[PolicyEntry, ...]:
        """Entries of the policy that decided about no operation."""
        policy = self.options.policy
        rulings = [op.record.ruling for op in self.operations]
        functions = {op.function for op in self.operations}
        others = {(r.origin, r.entry) for r in rulings if r.policy == policy.name}

        def used(kind: str, name: str) -> bool:
            return (
                name in functions
                if kind == "function"
                else (Origin(kind), name) in others
            )

        own = set(entries(policy))
        added = min((own - set(entries(Policy.load(b))) for b in BUILTIN), key=len)
        return tuple(
            PolicyEntry(*entry, added=entry in added)
            for entry in entries(policy)
            if not used(*entry[:2])
        )

    @property
    def attention(self) -> tuple[str, ...]:
        """What to know first, the gravest first: sentences, or none if all is well."""
        return tuple(self._notices())

    def _notices(self) -> Iterator[str]:
        matmuls = self.matmuls
        wide = [op for op in matmuls if not op.record.low]
        reasons = ", ".join(sorted({op.reason for op in wide}))
        if wide and len(wide) == len(matmuls):
            yield f"NO MATMUL RUNS IN 16 BITS: {reasons}"
        unknown = Counter(record.primitive for record in self.unknown)
        if unknown:
            counted = (f"{name} ({count})" for name, count in sorted(unknown.items()))
            listed = ", ".join(counted)
            yield f"ran as traced, because the policy does not know them: {listed}"
        added = ", ".join(str(entry) for entry in self.unused if entry.added)
        if added:
            yield f"entries added to the policy that decided about nothing: {added}"
        if 0 < len(wide) < len(matmuls):
            yield (
                f"{len(wide)} of {len(matmuls)} matmuls and convolutions "
                f"({1 - self.low_flop_share:.1%} of their FLOPs) do not run in 16 "
                f"bits: {reasons}"
            )

    @cached_property
    def modules(self) -> Module:
        """The program as a tree of modules, which are its named scopes.

        What stands in none is under the name of the user's function.
        """
        return module_of(self.name, self.operations)


def _words(options: Options) -> str:
    state = "" if options.enabled else ", disabled"
    return (
        f"on {options.device_type} to {options.dtype.name}{state}, "
        f"policy {options.policy.name}"
    )
