"""The figures of a report, which every form of it shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jamp._explain.attention import PolicyEntry, notices, unused_entries
from jamp._explain.operations import Counted, Module, module_of
from jamp._explain.residuals import Residuals
from jamp._plan.records import Record
from jamp._tracing.regions import Options


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
        return unused_entries(self.options.policy, self)

    @property
    def attention(self) -> tuple[str, ...]:
        """What to know first, the gravest first: sentences, or none if all is well."""
        return tuple(notices(self, self.unused))

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
