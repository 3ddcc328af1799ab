"""Functions with rules of their own for derivatives or batching.

Such a function is planned here; its rule, when it is differentiated or batched, by
`jamp._emit.custom_functions`. Before, the rule may be traced to tell what it would be
under the policy; one that cannot be, as a function need not have one that works, is
left to whoever asks for it.
"""

from contextlib import suppress
from typing import Any

import jax

from jamp import _dtypes, _primitives
from jamp._compat import is_plain_array, settings
from jamp._dtypes import FLOAT32
from jamp._equations.walks import closed, constants, nested, runs_in_float32
from jamp._errors import BannedOpError
from jamp._plan.equation import Equation
from jamp._plan.listed_calls import ruling_of_called
from jamp._plan.plain_equations import plan_as_traced
from jamp._plan.plan import Cast, Float32Call, Plan, Structural
from jamp._plan.programs import structural
from jamp._plan.records import with_inner
from jamp._plan.values import Value
from jamp._policy.rules import Rule
from jamp._tracing.derivative_rules import trace_jvp, trace_rules
from jamp._tracing.regions import holds_region
from jamp._tracing.users_casts import is_kept_cast, make_jaxpr


@structural("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
def plan_custom_call(equation: Equation) -> list[Value]:
    """Plans a function whose rules are kept and run under the same policy."""
    name = equation.eqn.primitive.name
    program = equation.eqn.params[_primitives.CALLS[name]]
    operands = equation.operands
    inner = equation.plan_held(program, operands)
    if any(value.traits.sum_dtype for value in operands):
        # As logaddexp, it may add to a loop's sum, or hand on one that was added to.
        kept = [value.kept for value in operands]
        trial = equation.plan_held(program, kept).handing_on_sums
        if any(value.adds for value in trial.results):
            inner, operands = trial, kept
    # Whether other rules would change is known only once JAX asks for them.
    changed = name != "custom_jvp_call" or inner.changed or _changes_rule(equation)
    in_float32 = _widens(inner) and _runs_in_float32(equation, closed(program))
    own = ruling_of_called(equation.context, inner.records, closed(program))
    if own is not None:
        equation = equation._replace(context=equation.context._replace(forced=own))
    return equation.bind_with(inner, operands, changed=changed, in_float32=in_float32)


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
    inner = equation.plan_held(expanded, equation.operands)
    rules, kind = _rules_of(equation)
    same = inner.result_dtypes == tuple(map(_dtypes.dtype_of, eqn.outvars))
    plans: list[tuple[Plan | None, Any]] = [(inner, expanded)]
    if not equation.context.tried:
        plans += [(_trial(equation, rule), rule) for rule in rules]
    if same and not any(_lowers(plan, program) for plan, program in plans):
        return plan_as_traced(equation)
    return equation.bind_with(inner, changed=True, kind=kind)


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
        return trial.plan_held(rule, [Value(aval) for aval in rule.in_avals])
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
