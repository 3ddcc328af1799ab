"""shard_map: the body is planned anew; mesh and specs are kept."""

from jamp._equations import closed
from jamp._plan.equation import Equation
from jamp._plan.rules.registry import structural
from jamp._plan.values import Value


@structural("shard_map")
def plan_shard_map(equation: Equation) -> list[Value]:
    """Plans a shard_map, whose body sees shards of its operands."""
    program = closed(equation.eqn.params["jaxpr"])
    shards = [
        Value.of(aval, value.dtype)
        for aval, value in zip(program.in_avals, equation.operands, strict=True)
    ]
    inner = equation.inner(program, shards)
    equation.note(inner)
    if not inner.changed:
        return equation.as_traced()
    return equation.add([inner], inner.dtypes)
