"""Calls: a jit stays one with its program planned anew; others dissolve into theirs."""

from jamp._equations import closed
from jamp._plan.equation import Equation
from jamp._plan.rules.registry import structural
from jamp._plan.values import Value


@structural("jit")
def plan_jit(equation: Equation) -> list[Value]:
    """Plans a jitted function; it keeps its name, donation, inlining and shardings."""
    operands = equation.operands
    slots = range(len(operands))
    inner = equation.inner(equation.eqn.params["jaxpr"], operands, hoisted=slots)
    return equation.calling(inner, [*operands, *equation.extras(operands, inner)])


@structural("call", "closed_call", "eval_jaxpr", "remat_opt")
def plan_call(equation: Equation) -> list[Value]:
    """Plans a call that means no more than its program."""
    params = equation.eqn.params
    program = closed(params["call_jaxpr" if "call_jaxpr" in params else "fwd_jaxpr"])
    equation.note_operands()
    return equation.planner.inline(
        program, equation.operands, equation.context, equation.plan
    )
