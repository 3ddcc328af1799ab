"""The smallest set of changes that cures a program, found by running it again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jamp._diagnose.diagnosis import Suggestion
from jamp._diagnose.examine import Examination, run_again
from jamp._diagnose.judge import Fault
from jamp._diagnose.program import Settings, Subject
from jamp._diagnose.suggest import Change, changes_for, last_resorts
from jamp._policy.functions import Function
from jamp._tracing.regions import Options

# How many faults are cured one after another, where one change does not cure all.
ROUNDS = 6
# How many operations behind the faults are tried, where no change at a fault cures it.
FURTHER = 8

Examine = Callable[[Settings], Examination]


def find_cure(subject: Subject, before: Examination, examine: Examine) -> list[Change]:
    """Changes that cure a program; none if no cure is found."""

    def cures(changes: Iterable[Change]) -> bool:
        settings = _applied(before.settings, changes)
        return not run_again(subject, settings, before).spoiled

    for changes in _attempts(before, examine):
        if cures(changes):
            return _smallest(changes, cures)
    return []


def _attempts(before: Examination, examine: Examine) -> Iterator[list[Change]]:
    """Changes to try together, those that cost the least first."""
    chosen: list[Change] = []
    examination = before
    for _ in range(ROUNDS):
        # What all faults have in common comes once.
        every = (changes_for(fault, examination) for fault in examination.faults)
        candidates = list(dict.fromkeys(chain.from_iterable(every)))
        yield from ([*chosen, change] for change in candidates)
        step = _step(examination, candidates, examine)
        if step is None:
            break
        change, examination = step
        chosen = [*chosen, change]
    for change in _further(examination):
        chosen = [*chosen, change]
        yield chosen
    for change in last_resorts(before):
        yield [change]


def _further(examination: Examination) -> list[Change]:
    """Changes for what led to the faults, the nearest first."""
    found: dict[Change, None] = {}
    for fault in examination.faults:
        for measured in fault.behind:
            changes = changes_for(Fault(fault.kind, measured), examination)
            local = [c for c in changes if c.kind not in ("loss_scale", "primitive")]
            found.update(dict.fromkeys(local[:1]))
            if len(found) == FURTHER:
                return list(found)
    return list(found)


def _step(
    examination: Examination, candidates: Sequence[Change], examine: Examine
) -> tuple[Change, Examination] | None:
    """The first change after which the first fault is gone, and others are left."""
    # Compiled as a whole, a program rounds otherwise: it may have no fault by now.
    first = examination.faults[0].measured if examination.faults else None
    if first is None:
        return None
    for change in candidates:
        if not change.covers(first):
            continue
        after = examine(change.apply(examination.settings))
        left = [f.measured for f in after.faults if f.measured is not None]
        if (first.location, first.scaled) not in [(m.location, m.scaled) for m in left]:
            return change, after
    return None


def _smallest(
    changes: list[Change], cures: Callable[[Iterable[Change]], bool]
) -> list[Change]:
    """The changes without those that the others do not need."""
    for change in changes[:-1]:
        rest = [other for other in changes if other is not change]
        if cures(rest):
            changes = rest
    return changes


def _applied(settings: Settings, changes: Iterable[Change]) -> Settings:
    for change in changes:
        settings = change.apply(settings)
    return settings


def suggestions_of(
    changes: Sequence[Change], settings: Settings, own_policy: bool
) -> tuple[Suggestion, ...]:
    """What to write for some changes, which together cure a program.

    `own_policy` is whether the user passed a policy.
    """
    found = []
    rules = [c for c in changes if c.kind in ("function", "scope", "primitive")]
    if rules:
        kind = settings.options.device_type
        base = "policy" if own_policy else f'jamp.Policy.load("{kind}")'
        reason = "; ".join(change.reason for change in rules)
        options = {"policy": _applied(settings, rules).options.policy}
        code = f"policy = {base}{_with_rules(rules)}\n{_call(settings.options, True)}"
        found.append(Suggestion(code, reason, True, options))
    for change in changes:
        options, scale = {}, None
        if change.kind == "loss_scale":
            scale = change.value
            code = f"scaler = jamp.GradScaler(init_scale={scale})"
        elif change.kind == "region":
            line = f"{Path(change.value[0]).name}:{change.value[1]}"
            code = f"with jamp.autocast(enabled=False):  # around {line}"
        elif change.kind == "dtype":
            code = _call(change.apply(settings).options, own_policy)
            options = {"dtype": change.value}
        else:
            continue
        found.append(Suggestion(code, change.reason, True, options, scale))
    return tuple(found)


def _with_rules(changes: Sequence[Change]) -> str:
    entries = [_entry(c.value) for c in changes if c.kind != "scope"]
    scopes = [f'.scoped("{c.value}", "float32")' for c in changes if c.kind == "scope"]
    rules = [f".with_rules(float32=[{', '.join(entries)}])"] if entries else []
    return "".join([*rules, *scopes])


def _call(options: Options, own_policy: bool) -> str:
    """A call of `jamp.autocast` with these options."""
    own_dtype = options.dtype != options.policy.dtype
    dtype = f", dtype=jnp.{options.dtype.name}" if own_dtype else ""
    policy = ", policy=policy" if own_policy else ""
    return f'jamp.autocast(fn, device_type="{options.device_type}"{dtype}{policy})'


def _entry(value: Any) -> str:
    if not isinstance(value, Function):
        return f'"{value}"'
    found = Function(value.name, required=False).resolve()
    if found is not None and found is value.resolve():
        return f'"{value.name}"'
    # No dotted name leads to the function, so the suggestion names the object.
    return value.name.rpartition("<locals>.")[2]
