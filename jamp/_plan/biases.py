"""Which sums are those of a product of a weight and its bias: they are one operation.

A bias varies only along dimensions of the product that are the weight's, and is nothing
that the program makes of iota and literals alone, as bin centres are. For that the
planner knows of a product which of its dimensions these are, and of other values along
which dimensions they are repeated. On CPUs the bias is added to what the product adds
up in float32, and the sum is rounded once, as in PyTorch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any, TypeGuard

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._dtypes import FLOAT32, size_of
from jamp._lowerings.hook import has_own_product
from jamp._plan.plan import Action, Bind, Cast, Plan
from jamp._plan.values import Value, Values

# Of more numbers a product is rounded by itself: in float32 it would be the largest
# array of many programs, as the scores of a vocabulary are.
_MOST = 2**22

# What is between a product and its bias, and is the same in float32.
_MOVES = (_primitives.MOVEMENT - {"convert_element_type"}) | {"split"}

Dims = tuple[int, ...]


def product_and_bias(x: Value, y: Value) -> Value | None:
    """The product, if of two values one is a lowered product and one its bias."""
    for product, other in ((x, y), (y, x)):
        if not product.low or other.follows or other.traits.table:
            continue
        # A scalar has none.
        shapes = zip(other.aval.shape, product.aval.shape, strict=False)
        spread = {d for d, (own, full) in enumerate(shapes) if own == 1 != full}
        varies = {*range(other.ndim)}.difference(other.traits.repeated, spread)
        dims = product.traits.bias_dims
        if len(varies) < product.ndim and any(map(varies.issubset, dims)):
            return product
    return None


def keep_float32(product: Value, plan: Plan) -> Value | None:
    """Has a plan keep the float32 that a product, moved or not, is rounded from.

    Returns:
      That; None if it stands in another plan, is one of JAX's own, or large.
    """
    known, moved = plan.float32_of_products, list[Bind]()
    source = product
    while source.number not in known:
        action = plan.makers.get(source.number)
        if not isinstance(action, Bind):
            return None
        name = action.eqn.primitive.name
        if has_own_product(name, action.operand_dtypes or (FLOAT32,) * 2):
            if not _splits_rounding(action, source, plan):
                return None
        elif moves(action):
            moved.append(action)
            source = action.operands[0]
        else:
            return None
    for action in reversed(moved):
        wide = moved_wide(action, known[action.operands[0].number])
        plan.actions.insert(plan.actions.index(action), wide)
        _remember(action, wide.results, plan)
    return known[product.number]


def _splits_rounding(action: Bind, product: Value, plan: Plan) -> bool:
    """Has a product give float32, which is rounded behind it; False if it is large."""
    size = size_of(product.aval.shape)
    if size is None or size > _MOST:
        return False
    made = _in_float32(action.results)
    at = plan.actions.index(action)
    rounds = Cast(tuple(made), action.results, action.caster)
    plan.actions[at : at + 1] = [replace(action, results=made), rounds]
    _remember(action, made, plan)
    return True


def _remember(action: Bind, wide: Values, plan: Plan) -> None:
    numbers = [v.number for v in action.results]
    plan.float32_of_products.update(zip(numbers, wide, strict=True))


def moves(action: Action) -> TypeGuard[Bind]:
    """Whether an action does with one value what is the same in float32."""
    moving = isinstance(action, Bind) and action.eqn.primitive.name in _MOVES
    return moving and len(action.operands) == 1


def moved_wide(action: Bind, source: Value) -> Bind:
    """An action that moves 16 bits, of the float32 that they were rounded from."""
    taken = (source,)
    return replace(
        action,
        operands=taken,
        results=_in_float32(action.results),
        operand_dtypes=(FLOAT32,),
        read=taken,
    )


def _in_float32(values: Values) -> list[Value]:
    return [Value.of(v.aval, FLOAT32, v.traits) for v in values]


def bias_dims(
    eqn: JaxprEqn, operands: Values, inputs: Values, *, in_listed: bool
) -> tuple[Dims, ...]:
    """For each weight that a product multiplies, along which dimensions a bias varies.

    Weights are of the program's inputs; that of a listed function, as of a Flax layer,
    may have come in 16 bits, as what is multiplied with it.
    """
    factors = operands[:2]
    weights = [not value.traits.activation for value in factors]
    if in_listed and not any(weights):
        weights = [True, True]
    if eqn.primitive.name == "conv_general_dilated":
        return ((eqn.params["dimension_numbers"].out_spec[1],),) if weights[1] else ()
    numbers: Any = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        summed, (batch, _) = eqn.params["dimension_numbers"]
        groups = 0
    else:
        summed, (batch, _) = numbers.dot_dimension_numbers
        groups = len(numbers.rhs_group_dimensions)
    ndim, count = len(_dtypes.shape_of(eqn.outvars[0])), len(batch)
    split = ndim - (factors[1].ndim - len(summed[1]) - count - groups)
    shared = tuple(range(count))
    found = ((*shared, *range(count, split)), (*shared, *range(split, ndim)))
    if count and all(weights) and not in_listed:
        # Experts, or scores of queries and keys. The last dimension of keys is summed
        # over, unless the program transposed them.
        left, right = (
            value.ndim - 1 in dims for value, dims in zip(factors, summed, strict=True)
        )
        given = [_is_input(value, inputs) for value in factors]
        weights = [given[0] and right and not left, given[1] and left and not right]
    return tuple(
        dims for dims, is_weight in zip(found, weights, strict=True) if is_weight
    )


def _is_input(value: Value, inputs: Values) -> bool:
    """Whether a value, or what it was cast from, is no result of the program."""
    given = any(value is v or value in v.casts.values() for v in inputs)
    return given or value.array is not None


def dims_after(eqn: JaxprEqn, dims: Dims, new: bool) -> Dims:
    """Where some dimensions of what an equation moves, and new ones, are after it."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        # Each result is one of its operands, which have shapes of their own.
        return dims
    before, after = map(_dtypes.shape_of, (eqn.invars[0], eqn.outvars[0]))
    if name in ("reshape", "squeeze"):
        order = eqn.params["dimensions"] if name == "reshape" else None
        if order is not None:
            # They change places first.
            before = tuple([before[d] for d in order])
            dims = tuple([order.index(d) for d in dims])
        return _reshaped(before, after, dims, new)
    places: Sequence[int] = range(len(after) - len(before), len(after))
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
    elif name == "transpose":
        places = [eqn.params["permutation"].index(d) for d in range(len(before))]
    found = {places[d] for d in dims}
    if new:
        found |= {*range(len(after))}.difference(places)
    return tuple(sorted(found))


def _reshaped(before: Any, after: Any, dims: Dims, new: bool) -> Dims:
    """Those dimensions of a new shape that are made of some of the old one alone."""
    ends = {*accumulate(before, mul)} & {*accumulate(after, mul)}
    ones = [d in dims for d, size in enumerate(before) if size == 1]
    whole: dict[int, bool] = {-1: all(ones) if ones else new}
    for d, group in enumerate(_groups(before, ends)):
        whole[group] = whole.get(group, True) and (group < 0 or d in dims)
    pairs = enumerate(_groups(after, ends))
    return tuple(d for d, group in pairs if whole.get(group, False))


def _groups(shape: Any, ends: set[Any]) -> list[int]:
    """For each dimension, the number of its group; -1 for those of size one."""
    groups, group, size = [], 0, 1
    for length in shape:
        groups.append(-1 if length == 1 else group)
        size *= length
        group += length != 1 and size in ends
    return groups
