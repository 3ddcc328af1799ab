"""Rules for equations that hold programs: what becomes of the programs inside.

Those of functions with rules of their own stand in `jamp._plan.custom_functions`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from jamp import _dtypes, _primitives
from jamp._compat import scan_counts
from jamp._equations.walks import closed
from jamp._plan.carries import (
    carry_in,
    depth_of,
    handed_on,
    left_by,
    meet,
    settled_carry,
)
from jamp._plan.equation import Equation
from jamp._plan.loop_starts import reads_unrounded
from jamp._plan.plain_equations import plan_plain
from jamp._plan.plan import Plan
from jamp._plan.records import Conversion
from jamp._plan.values import Traits, Value, Values
from jamp._policy.rules import Rule

StructuralRule = Callable[[Equation], list[Value]]

STRUCTURAL: dict[str, StructuralRule] = {}
# They hand references, and what else is no array, to their programs as they are. JAX
# makes others, such as functions with derivative rules, anew of arrays alone.
TAKING_REFERENCES = frozenset(
    "call closed_call cond eval_jaxpr jit remat2 scan shard_map while".split()
)


def structural(*names: str) -> Callable[[StructuralRule], StructuralRule]:
    """Registers what plans the equations of some primitives."""

    def register(rule: StructuralRule) -> StructuralRule:
        for name in names:
            if name in STRUCTURAL:
                known = STRUCTURAL[name].__qualname__
                raise ValueError(f"{name} has a rule already: {known}")
            STRUCTURAL[name] = rule
        return rule

    return register


@structural("jit", "remat2")
def plan_jit(equation: Equation) -> list[Value]:
    """Plans a jitted or checkpointed function, which keeps its parameters.

    What is checkpointed recomputes in the dtypes of the first run.
    """
    operands = [value.kept for value in equation.operands]
    hoisted = range(len(operands) if equation.eqn.primitive.name == "jit" else 0)
    inner = equation.plan_held(equation.eqn.params["jaxpr"], operands, hoisted)
    inner = inner.handing_on_sums
    extras = equation.hoisted_casts(operands, inner)
    return equation.bind_with(inner, [*operands, *extras])


@structural("call", "closed_call", "eval_jaxpr", "remat_opt")
def plan_call(equation: Equation) -> list[Value]:
    eqn = equation.eqn
    program = closed(eqn.params[_primitives.CALLS[eqn.primitive.name]])
    equation.record_held()
    caster = equation.caster
    return equation.plan_inline(
        program, equation.operands, equation.context, caster.plan, caster.lineage
    )


@structural("shard_map")
def plan_shard_map(equation: Equation) -> list[Value]:
    program = closed(equation.eqn.params["jaxpr"])
    operands = [value.kept for value in equation.operands]
    inner = equation.plan_held(program, _parts(program.in_avals, operands))
    inner = inner.handing_on_sums
    equation.record_held(inner)
    if not inner.changed:
        return equation.bind_as_traced()
    traits = [v.traits for v in _parts(program.out_avals, inner.results)]
    return equation.bind_programs([inner], inner.result_dtypes, operands, traits)


def _parts(avals: Iterable[Any], values: Values) -> list[Value]:
    """Parts of arrays, of which less is known."""
    return [
        Value.of(aval, value.dtype, handed_on(value))
        for aval, value in zip(avals, values, strict=True)
    ]


@structural("all_gather", "all_gather_invariant")
def plan_all_gather(equation: Equation) -> list[Value]:
    """Plans a gather over devices; its emission has gradients added up in float32."""
    (value,), rule = equation.operands, equation.caster.record.ruling.rule
    summed = value.traits.sum_dtype is not None
    if (
        equation.context.transposable
        or summed
        or not value.low
        or rule is not Rule.PROMOTE
    ):
        return plan_plain(equation)
    equation.record_held()
    equation.plan.changed = True
    return equation.bind_programs([], [value.dtype])


@structural("scan")
def plan_scan(equation: Equation) -> list[Value]:
    """Plans a scan; casts of what its iterations share stand outside it."""
    params, operands = equation.eqn.params, equation.operands
    num_consts, num_carry = scan_counts(params)
    carry = operands[num_consts:][:num_carry]
    consts = [value.kept for value in operands[:num_consts]]
    slices = [value.kept for value in operands[num_consts + num_carry :]]
    depth = depth_of(operands)
    sliced = _parts(params["jaxpr"].in_avals[num_consts + num_carry :], slices)
    # A cast that is made elsewhere has no transpose.
    hoisted = range(0 if equation.context.transposable else num_consts)
    inside = equation._replace(context=equation.context._replace(looped=True))

    def body(carried: Values) -> Plan:
        inputs = [*consts, *carried, *sliced]
        return inside.plan_held(params["jaxpr"], inputs, hoisted=hoisted)

    # Without an iteration the carry leaves as it came. A symbolic length may be zero.
    runs = isinstance(params["length"], int) and params["length"] > 0
    # As a scaled loss may need, cotangents stay in float32.
    whole = equation.context.transposed or not runs
    # What JAX keeps of the first half of a gradient, the other reads as this one does.
    wanted = num_carry if equation.context.derived else None

    def reads(first: Plan, place: int) -> bool:
        results = first.results[:wanted]
        return whole or reads_unrounded(first, num_consts + place, results)

    inner, settled, left = settled_carry(carry, body, depth, reads)
    changed = settled != [value.dtype for value in carry]
    traits = left_by(inner.results, carry, depth)
    inner = _with_sums(inner, num_carry, traits)
    equation.record_held(inner)
    # Its emission has their gradients added up in float32.
    rewrites = equation.caster.record.ruling.rule is not Rule.AS_TRACED
    adds_up = rewrites and any(_dtypes.below_float32(value.dtype) for value in consts)
    if not (inner.changed or changed or adds_up):
        return equation.bind_as_traced()
    equation.plan.changed = True
    _note_casts(equation, inner, settled)
    extras = equation.hoisted_casts(consts, inner)
    carried = map(equation.caster.cast, carry, settled)
    results = equation.bind_programs(
        [inner],
        [*settled, *inner.result_dtypes[num_carry:]],
        [*consts, *carried, *slices, *extras],
        traits,
    )
    for place, (own, low) in enumerate(zip(settled, left, strict=True)):
        if own != low and not whole:
            results[place] = equation.caster.cast(results[place], low)
    return results


def _with_sums(inner: Plan, num_carry: int, traits: Sequence[Traits]) -> Plan:
    """A loop's plan that leaves stacks of an outer loop's sums as they are kept."""
    stacks = zip(inner.results[num_carry:], traits[num_carry:], strict=True)
    kept = [value.kept if known.origins else value for value, known in stacks]
    return replace(inner, results=[*inner.results[:num_carry], *kept])


@structural("while")
def plan_while(equation: Equation) -> list[Value]:
    """Plans a loop's body at the dtypes where its carry settles, then its test."""
    params, operands = equation.eqn.params, equation.operands
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = operands[:num_cond], operands[num_cond:]
    body_consts, carry = [value.kept for value in rest[:num_body]], rest[num_body:]
    depth = depth_of(operands)

    def body(carried: Values) -> Plan:
        inputs = [*body_consts, *carried]
        return equation.plan_held(params["body_jaxpr"], inputs, hoisted=range(num_body))

    # The test reads what comes in, and so may whoever reads the results.
    inner, settled, _ = settled_carry(carry, body, depth, lambda *_: True)
    changed = settled != [value.dtype for value in carry]
    inputs = [*cond_consts, *carry_in(carry, settled)]
    test = equation.plan_held(params["cond_jaxpr"], inputs)
    equation.record_held(test, inner)
    if not (inner.changed or test.changed or changed):
        return equation.bind_as_traced()
    extras = equation.hoisted_casts(body_consts, inner)
    _note_casts(equation, inner, settled)
    carried = map(equation.caster.cast, carry, settled)
    return equation.bind_programs(
        [test, inner],
        settled,
        [*cond_consts, *body_consts, *carried, *extras],
        left_by(inner.results, carry, depth),
    )


@structural("cond")
def plan_cond(equation: Equation) -> list[Value]:
    """Plans a conditional or switch; its branches meet at the widest dtypes."""
    index, *inputs = [value.kept for value in equation.operands]
    programs = equation.eqn.params["branches"]
    branches = [
        equation.plan_held(program, inputs).handing_on_sums for program in programs
    ]
    equation.record_held(*branches)
    if not any(branch.changed for branch in branches):
        return equation.bind_as_traced()
    dtypes = [
        meet(options)
        for options in zip(*(branch.result_dtypes for branch in branches), strict=True)
    ]
    for branch in branches:
        _note_casts(equation, branch, dtypes)
    traits = []
    for options in zip(*(branch.results for branch in branches), strict=True):
        known = next((v for v in options if v.traits.probability), options[0])
        low = next(filter(None, (v.traits.sum_dtype for v in options)), None)
        if not all(v.is_kept or v.low for v in options):
            low = None  # A branch gives float32 of its own.
        origins = frozenset().union(*(v.traits.origins for v in options))
        traits.append(handed_on(known, activation=True, sum_dtype=low, origins=origins))
    return equation.bind_programs(branches, dtypes, [index, *inputs], traits)


def _note_casts(equation: Equation, inner: Plan, dtypes: Iterable[Any]) -> None:
    """Notes the casts of a program's first results to dtypes."""
    equation.caster.record.casts += [
        Conversion(value.dtype, dtype, value.aval.shape)
        for value, dtype in zip(inner.results, dtypes, strict=False)
        if value.dtype != dtype
    ]


@structural("custom_linear_solve")
def plan_linear_solve(equation: Equation) -> list[Value]:
    """Plans a linear solve; right sides and solutions keep the dtypes as traced."""
    eqn, operands, caster = equation.eqn, equation.operands, equation.caster
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    ends = list(accumulate(lengths))
    sides = [
        caster.cast(value, _dtypes.dtype_of(var)) if value.eligible else value
        for value, var in zip(operands, eqn.invars, strict=True)
    ][ends[-1] :]
    inner: list[Plan] = []
    for program, end, length in zip(programs, ends, lengths, strict=True):
        if program is None:
            continue
        plan = equation.plan_held(program, [*operands[end - length : end], *sides])
        _note_casts(equation, plan, map(_dtypes.dtype_of, program.jaxpr.outvars))
        inner.append(plan)
    equation.record_held(*inner)
    dtypes = map(_dtypes.dtype_of, eqn.outvars)
    return equation.bind_programs(inner, dtypes, [*operands[: ends[-1]], *sides])
