"""One element of each row, as the logit of a label, and its gradient.

JAX scatters the gradient into zeros: XLA writes an array as large as the logits, and
reads it again. A comparison of indices it computes inside of what reads the gradient.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.interpreters import ad

from jamp._dtypes import shape_of
from jamp._equations.walks import nested, replaced_in
from jamp._lowerings.own_primitives import like, register, with_rules_of_jax
from jamp._primitives import CALLS

_gather_p = like(lax.gather_p)
register(_gather_p, lax.gather_p.bind)
with_rules_of_jax({lax.gather_p: _gather_p})


def picking(
    eqn: JaxprEqn, arrays: Sequence[Any], counted: Sequence[int | None] = ()
) -> tuple[Any, Sequence[Any]]:
    """An equation, and what it takes, without a scatter in the gradient of its picks.

    Args:
      eqn: the equation: any, a gather, or a call of one, as of `take_along_axis`.
      arrays: what it takes.
      counted: of a gather, along which dimension each column of its indices counts.
    """
    by_row = counted and not spread_explicitly(arrays[0])
    found = _picked_by_row(eqn, counted) if by_row else None
    if found is None:
        return _with_compared_indices(eqn), arrays
    eqn, column = found
    operand, indices = arrays
    return eqn, [operand, lax.slice_in_dim(indices, column, column + 1, axis=-1)]


def _with_compared_indices(eqn: JaxprEqn) -> Any:
    calls = eqn.primitive.name in CALLS and any(map(_picks, nested([eqn])))
    if not (calls or _picks(eqn)):
        return eqn
    return replaced_in(eqn, _picks, lambda e: e.replace(primitive=_gather_p), {})


def _picked_by_row(
    eqn: JaxprEqn, counted: Sequence[int | None]
) -> tuple[JaxprEqn, int] | None:
    """An equation that picks one element of each row, from one with indices of rows.

    It is for the one column that does not count; beside it stands which this is.
    """
    numbers, operand = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    others = [column for column, along in enumerate(counted) if along is None]
    if len(others) != 1 or {*eqn.params["slice_sizes"]} != {1}:
        return None
    indices = shape_of(eqn.invars[1])
    pairs = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    for dimension, along in zip(numbers.start_index_map, counted, strict=True):
        if along is not None and operand[dimension] == indices[along]:
            pairs[dimension] = along
    axis = numbers.start_index_map[others[0]]
    by_row = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=tuple(sorted(pairs)),
        start_indices_batching_dims=tuple(pairs[row] for row in sorted(pairs)),
    )
    params = {**eqn.params, "dimension_numbers": by_row}
    if _axis_of_picks(operand, (*indices[:-1], 1), params) is None:
        return None
    return eqn.replace(primitive=_gather_p, params=params), others[0]


def _picks(eqn: JaxprEqn) -> bool:
    if eqn.primitive is not lax.gather_p:
        return False
    operand, indices = map(shape_of, eqn.invars)
    return _axis_of_picks(operand, indices, eqn.params) is not None


def spread_explicitly(array: Any) -> bool:
    """Whether JAX would have to be told how an iota beside it is spread."""
    return bool(jax.typeof(array).sharding.mesh.explicit_axes)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    operand, indices = primals
    result, tangent = _gather_p.bind(operand, indices, **params), tangents[0]
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    axis = _axis_of_picks(operand.shape, indices.shape, params)
    if axis is None or spread_explicitly(operand):
        # What is out of range has no tangent.
        params = {**params, "fill_value": 0}
        return result, lax.gather_p.bind(tangent, indices, **params)
    return result, _picked(tangent, indices, axis, params).reshape(result.shape)


def _axis_of_picks(
    shape: tuple[int, ...], indices: tuple[int, ...], params: dict[str, Any]
) -> int | None:
    """Along which dimension one element of each row is picked; None otherwise."""
    numbers, rank = params["dimension_numbers"], len(shape)
    if len(numbers.start_index_map) != 1 or {*params["slice_sizes"]} != {1}:
        return None
    axis = int(numbers.start_index_map[0])
    rows = [d for d in range(rank) if d != axis]
    in_order = (
        [*numbers.operand_batching_dims] == rows
        and [*numbers.start_indices_batching_dims] == [*range(rank - 1)]
        and {*indices[rank - 1 :]} == {1}
    )
    return axis if in_order else None


def _picked(array: Any, indices: Any, axis: int, params: dict[str, Any]) -> Any:
    """The elements at indices, added up with zeros for all others."""
    size = array.shape[axis]
    if indices.dtype.itemsize < jnp.int32.dtype.itemsize:
        indices = indices.astype(jnp.int32)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, size - 1)
    rows = array.shape[:axis] + array.shape[axis + 1 :]
    chosen = jnp.expand_dims(indices.reshape(rows), axis)
    places = lax.broadcasted_iota(indices.dtype, array.shape, axis)
    return jnp.sum(jnp.where(places == chosen, array, 0), axis)


ad.primitive_jvps[_gather_p] = _jvp
