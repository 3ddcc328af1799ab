"""Functions with rules of their own for derivatives or batching: the rules are kept.

The function is planned here. Its rule is traced, planned and run when it is
differentiated or batched, by `jamp._emit.derivatives`: not before, because a function
need not have a rule that works.
"""

from contextlib import suppress
from typing import Any

import jax

from jamp._plan.derivative_rules import trace_jvp
from jamp._plan.equation import Equation
from jamp._plan.rules.registry import structural
from jamp._plan.values import Value
from jamp._tracing.regions import holds_region, tracing


@structural("custom_jvp_call")
def plan_custom_jvp(equation: Equation) -> list[Value]:
    """Plans a custom_jvp function; its rule is kept and runs under the same policy."""
    inner = equation.inner(equation.eqn.params["call_jaxpr"], equation.operands)
    changed = inner.changed or _changes_rule(equation)
    return equation.calling(inner, changed=changed)


@structural("custom_vjp_call")
def plan_custom_vjp(equation: Equation) -> list[Value]:
    """Plans a custom_vjp function; its two rules are kept and run under the policy."""
    inner = equation.inner(equation.eqn.params["call_jaxpr"], equation.operands)
    # Whether its rules would change is known only once it is differentiated.
    return equation.calling(inner, changed=True)


@structural("custom_vmap_call")
def plan_custom_vmap(equation: Equation) -> list[Value]:
    """Plans a custom_vmap function; its rule is kept and runs under the same policy."""
    inner = equation.inner(equation.eqn.params["call"], equation.operands)
    return equation.calling(inner, changed=True)


@structural("remat2")
def plan_checkpoint(equation: Equation) -> list[Value]:
    """Plans a checkpointed function; it recomputes in the dtypes of the first run."""
    inner = equation.inner(equation.eqn.params["jaxpr"], equation.operands)
    return equation.calling(inner)


@structural("call_hi_primitive")
def plan_hi_primitive(equation: Equation) -> list[Value]:
    """Plans a primitive that expands into others; its derivative rule is kept."""
    primitive: Any = equation.eqn.primitive
    avals = [var.aval for var in equation.eqn.invars]
    with tracing(equation.context.region):
        expanded = jax.make_jaxpr(
            lambda *arrays: primitive.to_lojax(*arrays, **equation.eqn.params)
        )(*avals)
    inner = equation.inner(expanded, equation.operands)
    kind = "custom_vjp_call"
    with suppress(NotImplementedError):
        trace_jvp(equation.eqn, equation.context.region)
        kind = "custom_jvp_call"
    return equation.calling(inner, kind=kind)


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
    inputs = [Value(aval) for aval in program.in_avals]
    # A rule may call its own function.
    tried = equation.planner.inner(program, inputs, context._replace(tried=True))
    return tried.changed or holds_region(program)
