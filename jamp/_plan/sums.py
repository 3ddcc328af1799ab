"""What adds up, and is computed in float32 so that it is rounded once."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._dtypes import DType, shape_of, size_of
from jamp._equations.walks import followed
from jamp._plan.values import Carried, Value, Values

T = TypeVar("T")


def reduces_fully(eqn: JaxprEqn, operands: Values) -> bool:
    """Whether an equation makes a scalar, which promotes nothing, of an array."""
    return (
        eqn.primitive.name in _primitives.REDUCTIONS
        and not shape_of(eqn.outvars[0])
        and _dtypes.eligible(_dtypes.dtype_of(eqn.outvars[0]))
        and operands[0].ndim > 0
        and not operands[0].follows
    )


def adds_up(eqn: JaxprEqn, operands: Values) -> bool:
    """Whether an equation, or its gradient, adds up values of the program.

    So it does if it hands on what a loop adds up.
    """
    name = eqn.primitive.name
    if any(carried_sums(eqn, operands)):
        return True
    if name in _primitives.POOLS:
        sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
        return operands[0].eligible and any(map(operator.gt, sizes, strides))
    if name not in _primitives.REPEATING:
        return name in _primitives.ADDING and any(v.eligible for v in operands)
    size = math.prod(shape_of(eqn.outvars[0]))
    enlarges = name not in _primitives.ENLARGING or operands[0].aval.size != size
    return enlarges and operands[0].eligible and not operands[0].follows


class CarriedSum(NamedTuple):
    """A loop's sum, which an equation adds to or hands on."""

    dtype: DType  # which readers see of it
    origins: frozenset[Carried]


def made_of(eqn: JaxprEqn, operands: Sequence[T]) -> list[Sequence[T]]:
    """For each result of an equation the operands that it is made of."""
    count = len(eqn.outvars)
    if eqn.primitive.name not in _primitives.INDEPENDENT:
        return [operands] * count
    return [*([one] for one in operands), *[operands] * count][:count]


def carried_sums(eqn: JaxprEqn, operands: Values) -> Sequence[CarriedSum | None]:
    """Which of an equation's results are a loop's sum still, and which."""
    scaling = [
        value.follows or _only_scales(_own_sizes(value), eqn) for value in operands
    ]
    return _each_carried(eqn, list(map(_sum_of, operands)), scaling)


def _own_sizes(value: Value) -> list[Any]:
    """The sizes of the dimensions along which a value is not repeated."""
    repeated = value.traits.repeated
    return [n for at, n in enumerate(shape_of(value)) if at not in repeated]


def _only_scales(sizes: Sequence[Any], eqn: JaxprEqn) -> bool:
    """Whether a factor of these sizes is a number, or one for each row of a product."""
    count, size = size_of(sizes), size_of(shape_of(eqn.outvars[0]))
    return not sizes or (count is not None and size is not None and count < size)


def carried_through(
    eqns: Iterable[JaxprEqn], entering: Mapping[Any, Value]
) -> dict[Any, CarriedSum | None]:
    """The same of all that equations make, given the values of what they read."""
    known = {var: _sum_of(value) for var, value in entering.items()}
    if not any(known.values()):
        return {}

    def make(
        eqn: JaxprEqn, sums: list[CarriedSum | None]
    ) -> Sequence[CarriedSum | None]:
        scaling = [_only_scales(shape_of(atom), eqn) for atom in eqn.invars]
        return _each_carried(eqn, sums, scaling)

    return followed(eqns, known, make, literal=lambda _: None, unknown=None)


def _sum_of(value: Value) -> CarriedSum | None:
    known = value.traits
    return CarriedSum(known.sum_dtype, known.origins) if known.sum_dtype else None


def _each_carried(
    eqn: JaxprEqn, sums: Sequence[CarriedSum | None], scaling: Sequence[bool]
) -> list[CarriedSum | None]:
    """For each result of an equation the loop's sum that it is, if any.

    Args:
      eqn: the equation.
      sums: for each operand the same.
      scaling: which operands are numbers by which a sum may be scaled.
    """
    if not any(sums):
        return [None] * len(eqn.outvars)
    name, places = eqn.primitive.name, range(len(sums))
    return [
        _carried(name, [sums[p] for p in taken], [scaling[p] for p in taken])
        for taken in made_of(eqn, places)
    ]


def _carried(
    name: str, operands: Sequence[CarriedSum | None], scaling: Sequence[bool]
) -> CarriedSum | None:
    found = [operand for operand in operands if operand is not None]
    adds = name in _primitives.CARRYING or _is_scaled(name, operands, scaling)
    if not found or not (adds or name in _primitives.HANDING_ON):
        return None
    origins = frozenset().union(*(known.origins for known in found))
    if adds:
        origins = frozenset(origin._replace(added=True) for origin in origins)
    return CarriedSum(found[0].dtype, origins)


def _is_scaled(
    name: str, operands: Sequence[CarriedSum | None], scaling: Sequence[bool]
) -> bool:
    """Whether a sum is multiplied or divided by a number.

    Any other factor would have the float32 saved for its gradient.
    """
    ways = {"mul": [(0, 1), (1, 0)], "div": [(0, 1)]}.get(name, [])
    return any(operands[of] is not None and scaling[by] for of, by in ways)
