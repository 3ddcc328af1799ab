"""The smallest set of changes that cures a program, found by running it again."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, Literal, assert_never

from jamp._diagnose.diagnosis import Suggestion
from jamp._diagnose.examination import (
    Examination,
    run_again,
    scale_of_skipped,
    scale_window,
)
from jamp._diagnose.judge import Fault, behind, kind_of
from jamp._diagnose.measure import Measured
from jamp._diagnose.names import codes_around, leads_to, name_of
from jamp._diagnose.program import Settings, Subject
from jamp._dtypes import BFLOAT16, FLOAT16, below_float32
from jamp._policy.functions import Function
from jamp._policy.policy import Policy
from jamp._tracing.locations import stem_of
from jamp._tracing.options import Options

# A suggested loss scale leaves room for gradients that are larger.
HEADROOM = 4.0
# A rule that takes back more of the 16-bit results, or matmuls, is a last resort.
BROAD = 0.75
# How many faults are cured one after another, where one change does not cure all.
ROUNDS = 6
# How many operations behind the faults are tried, where no change at a fault cures it.
FURTHER = 8

Examine = Callable[[Settings], Examination]
Kind = Literal["loss_scale", "function", "scope", "primitive", "region", "dtype"]


@dataclass(frozen=True)
class Change:
    """One change to what is diagnosed, that may cure it."""

    kind: Kind
    value: Any  # the new scale or dtype, or what a rule or region is for
    reason: str = field(compare=False)  # why, in words

    def covers(self, output: Measured) -> bool:
        """Whether it changes what computes an output."""
        match self.kind:
            case "loss_scale":
                return output.scaled
            case "function":
                return self.value.resolve() in codes_around(output)[0]
            case "scope":
                return bool(output.scope[: len(self.value)] == self.value)
            case "primitive":
                return bool(output.primitive == self.value)
            case "region":
                return bool(output.location == self.value)
            case "dtype":
                return True
            case _:
                assert_never(self.kind)

    def apply(self, settings: Settings) -> Settings:
        options, policy = settings.options, settings.options.policy
        match self.kind:
            case "loss_scale":
                return replace(settings, loss_scale=self.value)
            case "region":
                return replace(settings, regions=settings.regions | {self.value})
            case "dtype":
                return replace(settings, options=replace(options, dtype=self.value))
            case "scope":
                policy = policy.scoped("/".join(self.value), "float32")
            case "function" | "primitive":
                policy = policy.with_rules(float32=[self.value])
            case _:
                assert_never(self.kind)
        return replace(settings, options=replace(options, policy=policy))


def changes_for(output: Measured, examination: Examination) -> list[Change]:
    """Small changes that may cure an output, in the order in which to try them."""
    line = [at for at in (output.location,) if at]
    regions = [Change("region", at, f"computes {at.short} in float32") for at in line]
    rules = _rules(output, examination, broad=False)
    matmuls = [m for m in examination.measured if m.is_product]

    def reaches_further(change: Change) -> bool:
        # Functions and modules may hold more, which costs little if it is no matmul.
        counted = examination.measured if change.kind == "primitive" else matmuls
        return any(change.covers(m) and m.location not in line for m in counted)

    scales = _scales(output, examination)
    # A rule that reaches beyond the line comes after the region, and last a scale below
    # 1, which makes small gradients smaller.
    return [
        *(change for change in scales if change.value >= 1),
        *sorted([*rules, *regions], key=reaches_further),
        *(change for change in scales if change.value < 1),
    ]


def last_resorts(examination: Examination) -> list[Change]:
    """Changes that undo much of what autocast is for, or bring another dtype."""
    first = examination.faults[0].measured
    found = _rules(first, examination, broad=True) if first else []
    # bfloat16 has fewer digits than float16: it cures no lack of precision.
    kinds = {fault.kind for fault in examination.faults}
    if examination.settings.options.dtype == FLOAT16 and "precision" not in kinds:
        reason = "bfloat16 has the range of float32, and fewer digits than float16"
        found.append(Change("dtype", BFLOAT16, reason))
    return found


def _rules(output: Measured, examination: Examination, broad: bool) -> list[Change]:
    """Rules for what an output stands in, by their share of what is in 16 bits."""
    narrowing = [m for m in examination.measured if below_float32(m.dtype)]
    matmuls = [m for m in narrowing if m.is_product]

    def share(change: Change) -> float:
        # The share of a single matmul says nothing.
        counted = [found for found in (narrowing, matmuls) if len(found) > 1]
        shares = (sum(map(change.covers, found)) / len(found) for found in counted)
        return max(shares, default=0.0)

    paths = (output.scope[:depth] for depth in range(len(output.scope), 0, -1))
    local = _functions(output, examination.settings)
    for path in paths:
        reason = f"computes module {'/'.join(path)} in float32"
        local.append(Change("scope", path, reason))
    rules = [*sorted(local, key=share), *_primitives(output, narrowing)]
    return [rule for rule in rules if (share(rule) > BROAD) is broad]


def _scales(output: Measured, examination: Examination) -> list[Change]:
    window = scale_window(examination)
    if window is None or not output.scaled:
        return []
    low, high = window
    middle = 2.0 ** round((math.log2(low) + math.log2(high)) / 2)
    # A scale below 1 makes small gradients smaller: it is as large as fits.
    scale = high / HEADROOM if middle < 1 else min(middle, high / HEADROOM)
    if scale == examination.settings.loss_scale:
        return []
    reason = f"loss scales from {low:g} to {high:g} keep gradients in range"
    if low > high:
        reason = (
            f"no gradient overflows up to loss scale {high:g}, though some underflow"
        )
    return [Change("loss_scale", scale, reason)]


def _functions(output: Measured, settings: Settings) -> list[Change]:
    """Functions that the output was emitted in, innermost first, each as a rule."""
    listed = {id(code): f.name for code, f in settings.options.policy.function_codes}
    codes, diagnosed = codes_around(output)
    functions = []
    for code in {id(code): code for code in codes}.values():
        name = listed.get(id(code))
        if name is None or not leads_to(name, code):
            name = name_of(code, diagnosed)
        if name is not None:
            functions.append(Function(name, code))
    return [Change("function", f, f"computes {f.name} in float32") for f in functions]


def _primitives(output: Measured, others: list[Measured]) -> Iterator[Change]:
    """Primitives of the line; a cast that autocast inserted is one of its operation."""
    matmuls = {other.primitive for other in others if other.is_product}
    on_line = [m for m in (output, *others) if m.location == output.location]
    for name in dict.fromkeys(other.primitive for other in on_line if not other.cast):
        reason = f"computes every {name} in float32"
        if matmuls == {name}:
            reason += (
                "; no matmul is then left in 16 bits: to change "
                f"{output.location or 'the program'} may be better"
            )
        yield Change("primitive", name, reason)


def cure(
    subject: Subject, before: Examination, examine: Examine
) -> tuple[list[Fault], tuple[Suggestion, ...]]:
    """The faults to tell of, and what cures them."""
    faults = before.faults
    if not faults or any(fault.kind == "float32" for fault in faults):
        return faults, ()
    scale = scale_of_skipped(before)
    if scale is not None:
        return faults, (_look_at_loss(scale),)
    changes = _find(subject, before, examine)
    if changes:
        return _causes(faults, changes), tuple(_suggest(changes, before))
    location = faults[0].measured.location if faults[0].measured else None
    reason = (
        "no rule cures this: the program itself computes there in 16 bits, or on values"
        " that do not fit; keep them in float32, or scale them"
    )
    return faults, (Suggestion(f"# change {location or 'the program'}", reason, False),)


def _look_at_loss(scale: float) -> Suggestion:
    reason = (
        "loss scaling skips this step, as it is to where a scaled gradient overflows, "
        "and lowers the scale for the next; this tells which scales fit"
    )
    code = f"jamp.diagnose(loss_fn, loss_scale={scale})"
    return Suggestion(code, reason, False)


def _causes(faults: list[Fault], changes: list[Change]) -> list[Fault]:
    """The faults that changes reach; or else also what led to them and is changed."""

    def changed(measured: Measured | None) -> bool:
        return measured is not None and any(c.covers(measured) for c in changes)

    causes = [fault for fault in faults if changed(fault.measured)]
    if causes:
        return causes
    led = [(m, fault) for fault in faults for m in behind(fault) if changed(m)]
    # The first fault is a finding too, unless it only made an error grow.
    seen = [fault for fault in faults[:1] if fault.kind != "precision"]
    causes = [Fault(kind_of(m), m, fault.spoils) for m, fault in led[:1]]
    return [*seen, *causes] or faults


def _find(subject: Subject, before: Examination, examine: Examine) -> list[Change]:
    """The changes after which a program is healthy, none of them superfluous."""

    def cures(changes: Iterable[Change]) -> bool:
        settings = _applied(before.settings, changes)
        return not run_again(subject, settings, before).spoiled

    for changes in filter(cures, _attempts(before, examine)):
        # The others may not need all of them.
        for change in changes[:-1]:
            rest = [other for other in changes if other is not change]
            changes = rest if cures(rest) else changes
        return changes
    return []


def _attempts(before: Examination, examine: Examine) -> Iterator[list[Change]]:
    """Changes to try together, those that cost the least first."""
    chosen: list[Change] = []
    examination = before
    for _ in range(ROUNDS):
        # What all faults have in common comes once.
        every = (changes_for(m, examination) for m in examination.at_fault)
        candidates = list(dict.fromkeys(chain.from_iterable(every)))
        yield from ([*chosen, change] for change in candidates)
        # Compiled as a whole, a program rounds otherwise: it may have no fault by now.
        if not examination.at_fault:
            break
        first = examination.at_fault[0]
        for change in candidates:
            if not change.covers(first):
                continue
            after = examine(change.apply(examination.settings))
            left = [(m.location, m.scaled) for m in after.at_fault]
            if (first.location, first.scaled) not in left:
                chosen, examination = [*chosen, change], after
                break
        else:
            break
    for change in _further(examination):
        chosen = [*chosen, change]
        yield chosen
    yield from ([change] for change in last_resorts(before))


def _further(examination: Examination) -> list[Change]:
    """Changes for what led to the faults, the nearest first."""
    found: dict[Change, None] = {}
    for measured in chain.from_iterable(map(behind, examination.faults)):
        changes = changes_for(measured, examination)
        local = [c for c in changes if c.kind not in ("loss_scale", "primitive")]
        found.update(dict.fromkeys(local[:1]))
        if len(found) == FURTHER:
            break
    return list(found)


def _applied(settings: Settings, changes: Iterable[Change]) -> Settings:
    return reduce(lambda found, change: change.apply(found), changes, settings)


def _suggest(
    changes: Sequence[Change], examination: Examination
) -> Iterator[Suggestion]:
    before = examination.settings.options
    rules = [c for c in changes if c.kind in ("function", "scope", "primitive")]
    if rules:
        after = _applied(examination.settings, rules).options
        kind = before.device_type
        base = "policy" if _own_policy(before) else f'jamp.Policy.load("{kind}")'
        every = "".join(_for_all(change, examination) for change in rules)
        code = f"policy = {base}{_with_rules(rules)}{every}\n{_call(after)}"
        reason = "; ".join(change.reason for change in rules)
        yield Suggestion(code, reason, True, {"policy": after.policy})
    for change in changes:
        match change.kind:
            case "loss_scale":
                code = f"scaler = jamp.GradScaler(init_scale={change.value})"
                yield Suggestion(code, change.reason, True, loss_scale=change.value)
            case "region":
                line = change.value.short
                code = f"with jamp.autocast(enabled=False):  # around {line}"
                if not any(
                    m.is_product for m in examination.measured if change.covers(m)
                ):
                    # Up to the next product, a cast does the same.
                    code = f".astype(jnp.float32)  # of what {line} takes"
                yield Suggestion(code, change.reason, True)
            case "dtype":
                code = _call(change.apply(examination.settings).options)
                yield Suggestion(code, change.reason, True, {"dtype": change.value})
            case "function" | "scope" | "primitive":
                pass  # All of these are one policy, above.
            case _:
                assert_never(change.kind)


def _with_rules(changes: Sequence[Change]) -> str:
    entries = [_entry(c) for c in changes if c.kind != "scope"]
    scopes = [_scoped("/".join(c.value)) for c in changes if c.kind == "scope"]
    rules = [f".with_rules(float32=[{', '.join(entries)}])"] if entries else []
    return "".join([*rules, *scopes])


def _scoped(pattern: str) -> str:
    return f'.scoped("{pattern}", "float32")'


def _for_all(change: Change, examination: Examination) -> str:
    """The rule for all modules that are alike, where one of several is cured."""
    stem = stem_of(change.value[-1]) if change.kind == "scope" else ""
    alike = {
        measured.scope[:depth]
        for measured in examination.measured
        for depth, name in enumerate(measured.scope, 1)
        if stem_of(name) == stem
    }
    if not stem or len(alike) < 2:
        return ""
    patterns = sorted({re.sub("[0-9]+$", "*", path[-1]) for path in alike})
    rules = "".join(_scoped(f"**/{pattern}") for pattern in patterns)
    return f"\n# or for all {len(alike)} alike: {rules}"


def _own_policy(options: Options) -> bool:
    return options.policy != Policy.load(options.device_type)


def _call(options: Options) -> str:
    own_dtype = options.dtype != options.policy.dtype
    dtype = f", dtype=jnp.{options.dtype.name}" if own_dtype else ""
    policy = ", policy=policy" if _own_policy(options) else ""
    return f'jamp.autocast(fn, device_type="{options.device_type}"{dtype}{policy})'


def _entry(change: Change) -> str:
    """An entry of a policy, as code: an object where no dotted name leads to it."""
    if change.kind != "function":
        return f'"{change.value}"'
    name = change.value.name
    return f'"{name}"' if leads_to(name, change.value.resolve()) else name
