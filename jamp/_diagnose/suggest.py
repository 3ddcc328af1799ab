"""Changes that may cure a fault: loss scales, policy rules, regions and dtypes."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

from jamp._compat import frames
from jamp._diagnose.examine import Examination, scale_window
from jamp._diagnose.judge import Fault
from jamp._diagnose.measure import Measured
from jamp._diagnose.program import Settings
from jamp._dtypes import BFLOAT16, FLOAT16, narrow
from jamp._policy.functions import Function
from jamp._tracing import trace
from jamp._tracing.origin import is_users

# A suggested loss scale leaves room for gradients that are larger.
HEADROOM = 4.0
# A rule that takes more than this share of the 16-bit results, or of the matmuls, back
# to float32 is a last resort.
BROAD = 0.75


@dataclass(frozen=True)
class Change:
    # `'loss_scale'`, `'function'`, `'scope'`, `'primitive'`, `'region'` or `'dtype'`.
    kind: str
    value: Any  # the new scale or dtype, or what a rule or region is for
    reason: str = field(compare=False)  # why, in words
    # Whether it changes what computes an output.
    covers: Callable[[Measured], bool] = field(compare=False)

    def apply(self, settings: Settings) -> Settings:
        options = settings.options
        policy = options.policy
        match self.kind:
            case "loss_scale":
                return replace(settings, loss_scale=self.value)
            case "region":
                return replace(settings, regions=settings.regions | {self.value})
            case "dtype":
                return replace(settings, options=replace(options, dtype=self.value))
            case "scope":
                policy = policy.scoped(self.value, "float32")
            case _:
                policy = policy.with_rules(float32=[self.value])
        return replace(settings, options=replace(options, policy=policy))


def changes_for(fault: Fault, examination: Examination) -> list[Change]:
    """Small changes that may cure a fault, in the order in which to try them."""
    output = fault.measured
    if output is None:
        return []
    small = [rule for rule, share in _rules(output, examination) if share <= BROAD]
    regions = list(_regions(output))
    matmuls = [m for m in examination.measured if m.matmul]

    def reaches_further(rule: Change) -> bool:
        # Functions and modules may hold more, which costs little if it is no matmul.
        counted = examination.measured if rule.kind == "primitive" else matmuls
        return any(
            rule.covers(output) and not any(r.covers(output) for r in regions)
            for output in counted
        )

    scales = list(_scales(output, examination))
    # A rule that reaches beyond the line comes after the region, and last a scale below
    # 1, which makes small gradients smaller.
    return [
        *(change for change in scales if change.value >= 1),
        *sorted([*small, *regions], key=reaches_further),
        *(change for change in scales if change.value < 1),
    ]


def last_resorts(examination: Examination) -> list[Change]:
    """Changes that undo much of what autocast is for, or bring another dtype."""
    first, options = examination.faults[0].measured, examination.settings.options
    rules = _rules(first, examination) if first else []
    found = [rule for rule, share in rules if share > BROAD]
    # bfloat16 has fewer digits than float16: it cures no lack of precision.
    kinds = {fault.kind for fault in examination.faults}
    if options.dtype == FLOAT16 and "precision" not in kinds:
        reason = "bfloat16 has the range of float32, and fewer digits than float16"
        found.append(Change("dtype", BFLOAT16, reason, lambda output: True))
    return found


def _rules(output: Measured, examination: Examination) -> list[tuple[Change, float]]:
    """Rules for what an output stands in, each with its share of what is in 16 bits."""
    narrowing = [m for m in examination.measured if narrow(m.dtype)]
    matmuls = [m for m in narrowing if m.matmul]

    def share(change: Change) -> float:
        # The share of a single matmul says nothing.
        counted = [found for found in (narrowing, matmuls) if len(found) > 1]
        shares = (sum(map(change.covers, found)) / len(found) for found in counted)
        return max(shares, default=0.0)

    local = [*_functions(output, examination.settings), *_scopes(output)]
    rules = [*sorted(local, key=share), *_primitives(output, narrowing)]
    return [(rule, share(rule)) for rule in rules]


def _scales(output: Measured, examination: Examination) -> Iterator[Change]:
    window = scale_window(examination)
    if window is None or not output.scaled:
        return
    low, high = window
    middle = 2.0 ** round((math.log2(low) + math.log2(high)) / 2)
    # A scale below 1 makes small gradients smaller: it is as large as fits.
    scale = high / HEADROOM if middle < 1 else min(middle, high / HEADROOM)
    if scale != examination.settings.loss_scale:
        reason = f"loss scales from {low:g} to {high:g} keep gradients in range"
        yield Change("loss_scale", scale, reason, lambda other: other.scaled)


def _functions(output: Measured, settings: Settings) -> Iterator[Change]:
    """Functions that the output was emitted in, innermost first, each as a rule."""
    listed = settings.options.policy.function_codes
    codes, outside = _codes(output)
    for code in dict.fromkeys(codes):
        if code in listed:
            function = listed[code]
        elif _is_nameable(code, outside):
            function = Function(_dotted(code), code)
        else:
            continue

        def covers(other: Measured, code: CodeType = code) -> bool:
            return code in _codes(other)[0]

        reason = f"computes {function.name} in float32"
        yield Change("function", function, reason, covers)


def _codes(output: Measured) -> tuple[list[CodeType], CodeType | None]:
    """Code of the functions around an output, innermost first, and of the outermost.

    What JAX traced on its own, such as a branch or what `jax.jit` holds, has frames up
    to there only; the callers have the others.
    """
    codes: list[CodeType] = []
    for eqn in output.eqns:
        found = frames(eqn)
        for code in () if found is None else found[0]:
            if code.co_filename == trace.__file__:
                break
            codes.append(code)
    users = [code for code in codes if is_users(code.co_filename)]
    if not users:
        return [], None
    outermost = users[-1]
    return [code for code in codes if code is not outermost], outermost


def _is_nameable(code: CodeType, diagnosed: CodeType | None) -> bool:
    """Whether there is a name for a function where the diagnosed one is defined."""
    if diagnosed is None or not is_users(code.co_filename) or "<" in code.co_name:
        return False
    around, local, _ = code.co_qualname.rpartition("<locals>.")
    same = code.co_filename == diagnosed.co_filename
    return not local or (same and diagnosed.co_qualname.startswith(around + local))


def _dotted(code: CodeType) -> str:
    """The name by which a policy finds the function of a code object, if it can."""
    qualname = code.co_qualname.removesuffix(".__call__")
    for module, loaded in list(sys.modules.items()):
        if module == "__main__" or "<locals>" in qualname:
            continue
        name = f"{module}.{qualname}"
        here = getattr(loaded, "__file__", None) == code.co_filename
        if here and Function(name, required=False).resolve() is code:
            return name
    return qualname.rpartition("<locals>.")[2]


def _scopes(output: Measured) -> Iterator[Change]:
    for depth in range(len(output.scope), 0, -1):
        path = output.scope[:depth]

        def covers(other: Measured, path: tuple[str, ...] = path) -> bool:
            return other.scope[: len(path)] == path

        name = "/".join(path)
        yield Change("scope", name, f"computes module {name} in float32", covers)


def _primitives(output: Measured, others: list[Measured]) -> Iterator[Change]:
    """Primitives of the line; a cast that autocast inserted is one of its operation."""
    matmuls = {other.primitive for other in others if other.matmul}
    on_line = [m for m in (output, *others) if m.location == output.location]
    for name in dict.fromkeys(other.primitive for other in on_line):
        if name == "convert_element_type":
            continue

        def covers(other: Measured, name: str = name) -> bool:
            return other.primitive == name

        reason = f"computes every {name} in float32"
        if matmuls == {name}:
            reason += (
                "; that leaves no matmul in 16 bits, so that a change of "
                f"{output.location or 'the program'} may be better"
            )
        yield Change("primitive", name, reason, covers)


def _regions(output: Measured) -> Iterator[Change]:
    location = output.location
    if location is not None:
        line = (location.file, location.line)
        reason = f"computes {Path(location.file).name}:{location.line} in float32"
        yield Change("region", line, reason, lambda other: other.location == location)
