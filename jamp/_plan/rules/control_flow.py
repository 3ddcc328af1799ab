"""Loops and branches: bodies are planned, carries settle, branches meet."""

from collections.abc import Callable, Sequence
from typing import Any

from jamp import _dtypes
from jamp._compat import scan_counts
from jamp._plan.equation import Equation
from jamp._plan.plan import Plan
from jamp._plan.records import Conversion
from jamp._plan.rules.registry import structural
from jamp._plan.values import Traits, Value


@structural("scan")
def plan_scan(equation: Equation) -> list[Value]:
    """Plans a scan; casts of what its iterations share stand outside it."""
    params, operands = equation.eqn.params, equation.operands
    num_consts, num_carry = scan_counts(params)
    consts, carry = operands[:num_consts], operands[num_consts:][:num_carry]
    slices = operands[num_consts + num_carry :]
    avals = params["jaxpr"].in_avals[num_consts + num_carry :]
    sliced = [
        _stand_in(aval, value.dtype) for aval, value in zip(avals, slices, strict=True)
    ]
    # A cast that is made elsewhere has no transpose.
    hoisted = range(0 if equation.context.linear else num_consts)

    def body(carried: Sequence[Value]) -> Plan:
        inputs = [*consts, *carried, *sliced]
        return equation.inner(params["jaxpr"], inputs, hoisted=hoisted)

    inner, settled = _settle(carry, body)
    equation.note(inner)
    if not inner.changed and _unchanged(carry, settled):
        return equation.as_traced()
    _note_casts(equation, inner, settled)
    extras = equation.extras(consts, inner)
    return equation.add(
        [inner],
        [*settled, *inner.dtypes[num_carry:]],
        [*consts, *_in_dtypes(equation, carry, settled), *slices, *extras],
    )


@structural("while")
def plan_while(equation: Equation) -> list[Value]:
    """Plans a while loop."""
    params, operands = equation.eqn.params, equation.operands
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = operands[:num_cond], operands[num_cond:]
    body_consts, carry = rest[:num_body], rest[num_body:]

    def body(carried: Sequence[Value]) -> Plan:
        inputs = [*body_consts, *carried]
        return equation.inner(params["body_jaxpr"], inputs, hoisted=range(num_body))

    inner, settled = _settle(carry, body)
    inputs = [*cond_consts, *_carried(carry, settled)]
    test = equation.inner(params["cond_jaxpr"], inputs)
    equation.note(test, inner)
    if not (inner.changed or test.changed) and _unchanged(carry, settled):
        return equation.as_traced()
    extras = equation.extras(body_consts, inner)
    _note_casts(equation, inner, settled)
    return equation.add(
        [test, inner],
        settled,
        [*cond_consts, *body_consts, *_in_dtypes(equation, carry, settled), *extras],
    )


@structural("cond")
def plan_cond(equation: Equation) -> list[Value]:
    """Plans a conditional or switch; its branches meet at the widest dtypes."""
    inputs = equation.operands[1:]
    programs = equation.eqn.params["branches"]
    branches = [equation.inner(program, inputs) for program in programs]
    equation.note(*branches)
    if not any(branch.changed for branch in branches):
        return equation.as_traced()
    dtypes = [
        _meet(options)
        for options in zip(*(branch.dtypes for branch in branches), strict=True)
    ]
    for branch in branches:
        _note_casts(equation, branch, dtypes)
    return equation.add(branches, dtypes)


def _note_casts(equation: Equation, inner: Plan, dtypes: Sequence[Any]) -> None:
    """Notes the casts of a program's first results to dtypes."""
    equation.caster.record.casts += [
        Conversion(value.dtype, dtype, value.aval.shape)
        for value, dtype in zip(inner.results, dtypes, strict=False)
        if value.dtype != dtype
    ]


def _in_dtypes(
    equation: Equation, values: Sequence[Value], dtypes: Sequence[Any]
) -> list[Value]:
    pairs = zip(values, dtypes, strict=True)
    return [equation.caster.cast(value, dtype) for value, dtype in pairs]


def _meet(dtypes: Sequence[Any]) -> Any:
    floats = [dtype for dtype in dtypes if dtype is not None]
    if floats and all(map(_dtypes.eligible, floats)):
        return _dtypes.widest(floats)
    return dtypes[0]


def _settle(
    carry: Sequence[Value], body: Callable[[Sequence[Value]], Plan]
) -> tuple[Plan, list[Any]]:
    """Finds the dtypes at which a loop's carry stays what it is.

    They are those that iterating one by one would come to, from the dtypes that come
    in; where it would go back and forth, the widest.
    """
    dtypes = [value.dtype for value in carry]
    seen = [dtypes]
    while True:
        inner = body(_carried(carry, dtypes))
        after = list(inner.dtypes[: len(carry)])
        if after == dtypes:
            return inner, dtypes
        if after in seen or len(seen) > len(carry) + 1:
            after = [_meet(options) for options in zip(dtypes, after, strict=True)]
            if after == dtypes:
                return inner, dtypes
        dtypes = after
        seen.append(dtypes)


def _carried(carry: Sequence[Value], dtypes: Sequence[Any]) -> list[Value]:
    """Stand-ins for a loop's carry in certain dtypes."""
    pairs = zip(carry, dtypes, strict=True)
    return [_stand_in(value.aval, dtype) for value, dtype in pairs]


def _stand_in(aval: Any, dtype: Any) -> Value:
    """A value of a type in another dtype, of which nothing else is known."""
    return Value.of(aval, dtype, Traits(rank=getattr(aval, "ndim", 0)))


def _unchanged(carry: Sequence[Value], dtypes: Sequence[Any]) -> bool:
    return [value.dtype for value in carry] == list(dtypes)
