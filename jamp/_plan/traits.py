"""What is known of an equation's results from what is known of its operands."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp import _primitives as primitives
from jamp._plan import intervals
from jamp._plan.casting import Caster
from jamp._plan.values import Traits, Value
from jamp._policy.rules import Rule


def result_traits(
    eqn: JaxprEqn, operands: Sequence[Value], used: Sequence[Any], caster: Caster
) -> Traits:
    """What is known of an equation's results."""
    name = eqn.primitive.name
    rank = len(_dtypes.shape_of(eqn.outvars[0])) if eqn.outvars else 0
    floats = [v for v in operands if v.eligible]
    ruling = caster.record.ruling
    interval = None
    if ruling.rule is Rule.PROMOTE:
        interval = intervals.propagate(eqn, [v.traits.interval for v in operands])
    if name in primitives.MATMULS:
        return Traits(rank=rank, product=all(d in _dtypes.LOW_DTYPES for d in used[:2]))
    unsafe = caster.options.policy.unsafe
    if any(name in u.of for u in unsafe):
        return Traits(rank=rank, probability=True)
    if name in primitives.MOVEMENT and floats:
        source = floats[0].traits
        return source._replace(
            interval=interval, rank=_rank_after(eqn, source.rank, rank)
        )
    traits = Traits(interval, rank)
    if unsafe and name in primitives.KEEPING_PROBABILITY:
        firm = [v for v in floats if not v.follows]
        if len(firm) == 1 and firm[0].traits.probability:
            return traits._replace(probability=True, rounded=firm[0].traits.rounded)
    return traits


def _rank_after(eqn: JaxprEqn, before: int, ndim: int) -> int:
    """Rank of a moved value, without the dimensions that moving it added."""
    if eqn.primitive.name == "reshape":
        old, new = map(_dtypes.shape_of, (eqn.invars[0], eqn.outvars[0]))
        if [d for d in old if d != 1] != [d for d in new if d != 1]:
            return ndim
    return min(before, ndim)
