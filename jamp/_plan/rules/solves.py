"""custom_linear_solve: its programs are planned; what passes between them is kept."""

from itertools import accumulate

from jamp import _dtypes
from jamp._plan.equation import Equation
from jamp._plan.plan import Plan
from jamp._plan.records import Conversion
from jamp._plan.rules.registry import structural
from jamp._plan.values import Value


@structural("custom_linear_solve")
def plan_linear_solve(equation: Equation) -> list[Value]:
    """Plans a linear solve; right sides and solutions keep the dtypes as traced."""
    _, eqn, operands, _, caster = equation
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
        caster.record.casts += [
            Conversion(value.dtype, var.aval.dtype, value.aval.shape)
            for value, var in zip(plan.results, program.jaxpr.outvars, strict=True)
            if value.dtype != _dtypes.dtype_of(var)
        ]
        inner.append(plan)
    equation.note(*inner)
    dtypes = map(_dtypes.dtype_of, eqn.outvars)
    taken = [*operands[: ends[-1]], *sides]
    return equation.add(inner, dtypes, taken)
