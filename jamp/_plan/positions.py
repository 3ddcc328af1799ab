"""Arrays of positions, as of arange: each element is its index along a dimension."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jamp._dtypes import size_of
from jamp._plan.plan import Bind, Plan
from jamp._plan.values import Value


def counted_columns(
    eqn: JaxprEqn, value_of: Callable[[Any], Value | None], plan: Plan
) -> tuple[int | None, ...]:
    """Along which dimension each column of a gather's indices counts, if it does.

    In `x[jnp.arange(n), labels]` the first column counts along the first dimension.

    Args:
      eqn: an equation; of what is no gather nothing counts.
      value_of: gives the value of a variable, if the plan has it.
      plan: the plan.
    """
    if eqn.primitive.name != "gather":
        return ()
    indices = value_of(eqn.invars[1])
    if indices is None:
        return ()
    columns = _made_by(indices, plan, "concatenate")
    last = indices.ndim - 1
    if columns is None or columns.eqn.params["dimension"] != last:
        return ()
    if any(column.aval.shape[last] != 1 for column in columns.operands):
        return ()
    return tuple([_counted(column, plan) for column in columns.operands])


def _counted(value: Value, plan: Plan) -> int | None:
    """The dimension along which each element is its own index, if there is one."""
    if value.array is not None:
        at_hand = _at_hand(value.array, np.integer)
        return None if at_hand is None else _counted_in(at_hand)
    action = _made_by(value, plan)
    if action is None:
        return None
    eqn, operands = action.eqn, action.operands
    match eqn.primitive.name:
        case "iota" if _holds_positions(value):
            return int(eqn.params["dimension"])
        case "convert_element_type" if _holds_positions(value):
            return _counted(operands[0], plan)
        case "broadcast_in_dim":
            inner = _counted(operands[0], plan)
            return None if inner is None else _spread(eqn, operands[0], inner)
        case "select_n":
            return _counted(operands[1], plan) if _from_the_end(action, plan) else None
    return None


def _holds_positions(value: Value) -> bool:
    """Whether its dtype has the indices of all its elements."""
    dtype, shape = value.aval.dtype, value.aval.shape
    if not np.issubdtype(dtype, np.integer):
        return False
    size = size_of(shape)
    return dtype.itemsize >= 4 or (size is not None and size <= np.iinfo(dtype).max)


def _made_by(value: Value, plan: Plan, name: str | None = None) -> Bind | None:
    action = plan.makers.get(value.number)
    if not isinstance(action, Bind):
        return None
    return action if name in (None, action.eqn.primitive.name) else None


def _spread(eqn: JaxprEqn, source: Value, inner: int) -> int | None:
    """Where a broadcast puts a dimension, if it does not repeat it."""
    dimension = int(eqn.params["broadcast_dimensions"][inner])
    same = eqn.params["shape"][dimension] == source.aval.shape[inner]
    return dimension if same else None


def _from_the_end(select: Bind, plan: Plan) -> bool:
    """Whether it replaces negative indices alone, as indexing does first of all."""
    chosen, kept, *_ = select.operands
    if chosen.array is not None:
        # NumPy has compared them before.
        at_hand = _at_hand(chosen.array, np.bool_)
        return at_hand is not None and not at_hand.any()
    negative = _made_by(chosen, plan, "lt")
    if negative is None:
        return False
    compared, bound = negative.operands
    return compared.number == kept.number and bound.constant == 0


def _counted_in(found: Any) -> int | None:
    for dimension, size in enumerate(found.shape):
        others = tuple(d for d in range(found.ndim) if d != dimension)
        counts = np.expand_dims(np.arange(size), others)
        if size and np.array_equal(found, np.broadcast_to(counts, found.shape)):
            return dimension
    return None


def _at_hand(known: Any, kind: Any) -> Any:
    """What a program closed over; None if it is elsewhere, or of another kind."""
    tracer = isinstance(known, jax.core.Tracer)
    elsewhere = isinstance(known, jax.Array) and not known.is_fully_addressable
    if tracer or elsewhere:
        return None
    found = np.asarray(known)
    return found if np.issubdtype(found.dtype, kind) else None
