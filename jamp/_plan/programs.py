"""Rules for equations that hold programs: what becomes of the programs inside.

A function with rules of its own for derivatives or batching is planned here; its rule,
when it is differentiated or batched, by `jamp._emit.custom_functions`. Before, the rule
may be traced to tell what it would be under the policy; one that cannot be, as a
function need not have one that works, is left to whoever asks for it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax

from jamp import _dtypes, _primitives
from jamp._compat import is_plain_array, scan_counts, settings
from jamp._dtypes import FLOAT32
from jamp._equations import closed, constants, nested, runs_in_float32
from jamp._errors import BannedOpError
from jamp._plan.carries import (
    carry_in,
    depth_of,
    handed_on,
    left_by,
    meet,
    settled_carry,
)
from jamp._plan.listed_calls import ruling_of_called
from jamp._plan.plain_equations import plan_as_traced, plan_plain
from jamp._plan.plan import Cast, Equation, Float32Call, Plan, Structural
from jamp._plan.records import Conversion, with_inner
from jamp._plan.values import Traits, Value, Values
from jamp._policy.rules import Rule
from jamp._tracing.casts import is_kept_cast, make_jaxpr
from jamp._tracing.derivative_rules import trace_jvp, trace_rules
from jamp._tracing.regions import holds_region

StructuralRule = Callable[[Equation], list[Value]]

STRUCTURAL: dict[str, StructuralRule] = {}


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
    inner = equation.inner(equation.eqn.params["jaxpr"], operands, hoisted)
    inner.results = [value.kept for value in inner.results]
    extras = equation.extras(operands, inner)
    return equation.calling(inner, [*operands, *extras])


@structural("call", "closed_call", "eval_jaxpr", "remat_opt")
def plan_call(equation: Equation) -> list[Value]:
    eqn = equation.eqn
    program = closed(eqn.params[_primitives.CALLS[eqn.primitive.name]])
    equation.note()
    caster = equation.caster
    return equation.plan_inline(
        program, equation.operands, equation.context, caster.plan, caster.source
    )


@structural("shard_map")
def plan_shard_map(equation: Equation) -> list[Value]:
    program = closed(equation.eqn.params["jaxpr"])
    operands = [value.kept for value in equation.operands]
    inner = equation.inner(program, _parts(program.in_avals, operands))
    inner.results = [value.kept for value in inner.results]
    equation.note(inner)
    if not inner.changed:
        return equation.as_traced()
    traits = [v.traits for v in _parts(program.out_avals, inner.results)]
    return equation.add([inner], inner.dtypes, operands, traits)


def _parts(avals: Iterable[Any], values: Values) -> list[Value]:
    """Parts of arrays, of which less is known."""
    return [
        Value.of(
            aval,
            value.dtype,
            handed_on(
                value,
                data=value.traits.data,
                sums=value.traits.sums,
                origins=value.traits.origins,
            ),
        )
        for aval, value in zip(avals, values, strict=True)
    ]


@structural("all_gather", "all_gather_invariant")
def plan_all_gather(equation: Equation) -> list[Value]:
    """Plans a gather over devices; its emission has gradients added up in float32."""
    (value,), rule = equation.operands, equation.caster.record.ruling.rule
    summed = value.traits.sums is not None
    if equation.context.linear or summed or not value.low or rule is not Rule.PROMOTE:
        return plan_plain(equation)
    equation.note()
    equation.plan.changed = True
    return equation.add([], [value.dtype])


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
    hoisted = range(0 if equation.context.linear else num_consts)
    inside = equation._replace(context=equation.context._replace(looped=True))

    def body(carried: Values) -> Plan:
        inputs = [*consts, *carried, *sliced]
        return inside.inner(params["jaxpr"], inputs, hoisted=hoisted)

    cotangents = equation.context.transposed
    inner, settled, changed = settled_carry(carry, body, depth, cotangents=cotangents)
    traits = left_by(inner.results, carry, depth)
    inner = _with_sums(inner, num_carry, traits)
    equation.note(inner)
    # Its emission has their gradients added up in float32.
    rewrites = equation.caster.record.ruling.rule is not Rule.AS_TRACED
    adds_up = rewrites and any(_dtypes.below_float32(value.dtype) for value in consts)
    if not (inner.changed or changed or adds_up):
        return equation.as_traced()
    equation.plan.changed = True
    _note_casts(equation, inner, settled)
    extras = equation.extras(consts, inner)
    carried = map(equation.caster.cast, carry, settled)
    return equation.add(
        [inner],
        [*settled, *inner.dtypes[num_carry:]],
        [*consts, *carried, *slices, *extras],
        traits,
    )


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
        return equation.inner(params["body_jaxpr"], inputs, hoisted=range(num_body))

    inner, settled, changed = settled_carry(carry, body, depth)
    inputs = [*cond_consts, *carry_in(carry, settled)]
    test = equation.inner(params["cond_jaxpr"], inputs)
    equation.note(test, inner)
    if not (inner.changed or test.changed or changed):
        return equation.as_traced()
    extras = equation.extras(body_consts, inner)
    _note_casts(equation, inner, settled)
    carried = map(equation.caster.cast, carry, settled)
    return equation.add(
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
    branches = [equation.inner(program, inputs) for program in programs]
    for branch in branches:
        branch.results = [value.kept for value in branch.results]
    equation.note(*branches)
    if not any(branch.changed for branch in branches):
        return equation.as_traced()
    dtypes = [
        meet(options)
        for options in zip(*(branch.dtypes for branch in branches), strict=True)
    ]
    for branch in branches:
        _note_casts(equation, branch, dtypes)
    traits = []
    for options in zip(*(branch.results for branch in branches), strict=True):
        known = next((v for v in options if v.traits.probability), options[0])
        low = next(filter(None, (v.traits.sums for v in options)), None)
        if not all(v.is_kept or v.low for v in options):
            low = None  # A branch gives float32 of its own.
        origins = frozenset().union(*(v.traits.origins for v in options))
        traits.append(handed_on(known, data=True, sums=low, origins=origins))
    return equation.add(branches, dtypes, [index, *inputs], traits)


def _note_casts(equation: Equation, inner: Plan, dtypes: Iterable[Any]) -> None:
    """Notes the casts of a program's first results to dtypes."""
    equation.caster.record.casts += [
        Conversion(value.dtype, dtype, value.aval.shape)
        for value, dtype in zip(inner.results, dtypes, strict=False)
        if value.dtype != dtype
    ]


@structural("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
def plan_custom_call(equation: Equation) -> list[Value]:
    """Plans a function whose rules are kept and run under the same policy."""
    name = equation.eqn.primitive.name
    program = equation.eqn.params[_primitives.CALLS[name]]
    operands = equation.operands
    inner = equation.inner(program, operands)
    if any(value.traits.sums for value in operands):
        # As logaddexp, it may add to a loop's sum, or hand on one that was added to.
        kept = [value.kept for value in operands]
        trial = equation.inner(program, kept)
        results = [value.kept for value in trial.results]
        if any(value.adds for value in results):
            trial.results = results
            inner, operands = trial, kept
    # Whether other rules would change is known only once JAX asks for them.
    changed = name != "custom_jvp_call" or inner.changed or _changes_rule(equation)
    in_float32 = _widens(inner) and _runs_in_float32(equation, closed(program))
    own = ruling_of_called(equation.context, inner.records, closed(program))
    if own is not None:
        equation = equation._replace(context=equation.context._replace(forced=own))
    return equation.calling(inner, operands, changed=changed, in_float32=in_float32)


@structural("call_hi_primitive")
def plan_hi_primitive(equation: Equation) -> list[Value]:
    """Plans a primitive that expands into others, and has rules of its own.

    Left as it is, it keeps all of them. In its place, what it expands into keeps one
    rule for derivatives, and none for being transposed.
    """
    eqn, region = equation.eqn, equation.context.region
    if not all(is_plain_array(var.aval) for var in eqn.outvars):
        return plan_as_traced(equation)
    primitive: Any = eqn.primitive
    expand = make_jaxpr(
        lambda *arrays: primitive.to_lojax(*arrays, **eqn.params), region
    )
    with settings(eqn):
        expanded = expand(*(var.aval for var in eqn.invars))
    inner = equation.inner(expanded, equation.operands)
    rules, kind = _rules_of(equation)
    same = inner.dtypes == tuple(map(_dtypes.dtype_of, eqn.outvars))
    plans: list[tuple[Plan | None, Any]] = [(inner, expanded)]
    if not equation.context.tried:
        plans += [(_trial(equation, rule), rule) for rule in rules]
    if same and not any(_lowers(plan, program) for plan, program in plans):
        return plan_as_traced(equation)
    return equation.calling(inner, changed=True, kind=kind)


def _rules_of(equation: Equation) -> tuple[tuple[Any, ...], str]:
    """The derivative rules of a high-level primitive, and as whose they are run."""
    eqn, region = equation.eqn, equation.context.region
    with suppress(Exception):  # it has none, or none that works
        return (trace_jvp(eqn, region),), "custom_jvp_call"
    rules: tuple[Any, ...] = ()
    with suppress(Exception):
        rules = trace_rules(eqn, region)
    return rules, "custom_vjp_call"


def _lowers(plan: Plan | None, program: Any) -> bool:
    """Whether a rule of the policy asks for 16 bits in a program, or a region may.

    So may one that the policy bans, which has no plan.
    """
    if plan is None:
        return True
    lowers = any(r.ruling.rule is Rule.LOWER for r in with_inner(plan.records))
    return lowers or holds_region(program)


def _changes_rule(equation: Equation) -> bool:
    """Whether a rule runs differently under the policy, although its function does not.

    JAX traces the rule of an equation that stays as it is when it is differentiated,
    outside of autocast, where a region would be an error.
    """
    context = equation.context
    if context.forced is not None or context.tried:
        return False
    try:
        program = trace_jvp(equation.eqn, context.region)
    except Exception:  # noqa: BLE001 - for whoever differentiates to see
        return True
    plan = _trial(equation, program)
    return plan is None or plan.changed or holds_region(program)


def _trial(equation: Equation, rule: Any) -> Plan | None:
    """The plan of a derivative rule, which may call its own function.

    None for one in which something is banned, which is for whoever differentiates.
    """
    trial = equation._replace(context=equation.context._replace(tried=True))
    with suppress(BannedOpError):
        return trial.inner(rule, [Value(aval) for aval in rule.in_avals])
    return None


def _widens(plan: Plan) -> bool:
    """Whether a program computes something in float32 on 16 bits."""
    return any(
        isinstance(action, Float32Call)
        or (isinstance(action, Cast) and action.dtype == FLOAT32)
        or (isinstance(action, Structural) and any(map(_widens, action.plans)))
        for action in plan.actions
    )


def _runs_in_float32(equation: Equation, program: Any) -> bool:
    """Whether a function and its derivative rules are cheap to run as traced."""
    other = equation.eqn.primitive.name == "custom_vmap_call"
    # Most functions that are not cheap are known before their rules are traced.
    if other or not _is_cheap_as_traced(program):
        return False
    try:
        rules = trace_rules(equation.eqn, equation.context.region)
    except Exception:  # noqa: BLE001 - for whoever differentiates to see
        return False
    return all(map(_is_cheap_as_traced, rules))


def _is_cheap_as_traced(program: Any) -> bool:
    """Whether a function, or a derivative rule of one, may run in float32 alone."""
    eqns = [*nested(program.eqns)]
    # A rule calls its own function, as a rule.
    cheap = _primitives.CHEAP | {"custom_vjp_call"}
    return (
        {eqn.primitive.name for eqn in eqns} <= cheap
        and runs_in_float32(program.eqns)
        and not any(map(is_kept_cast, eqns))
        and not holds_region(program)
        # The rule would be asked for when what it closes over is gone.
        and not any(isinstance(const, jax.core.Tracer) for const in constants(program))
    )


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
        plan = equation.inner(program, [*operands[end - length : end], *sides])
        _note_casts(equation, plan, map(_dtypes.dtype_of, program.jaxpr.outvars))
        inner.append(plan)
    equation.note(*inner)
    dtypes = map(_dtypes.dtype_of, eqn.outvars)
    return equation.add(inner, dtypes, [*operands[: ends[-1]], *sides])
