"""What an action could do in the float32 that its equation was traced in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jamp import _primitives
from jamp._dtypes import FLOAT32
from jamp._equations.walks import nested, runs_in_float32
from jamp._plan.biases import product_and_bias
from jamp._plan.plan import Action, Bind, Structural
from jamp._plan.values import Value
from jamp._policy.rules import Rule


class Kind(NamedTuple):
    """Of an action that could run in the float32 that its equation was traced in."""

    gives_low: bool  # whether its results have 16 bits
    exact: bool = False  # whether it makes no rounding of its own
    moves: bool = False  # whether it changes no number at all
    linear: bool = False  # whether its backward pass needs nothing of its operands
    scales: bool = False  # whether it scales or shifts 16 bits by a constant number
    masks: bool = False  # whether it does so by constants, a number or an array
    compares: bool = False  # whether it takes 16 bits and gives none, as comparisons
    orders: bool = False  # whether it orders them, or says which come first
    again: bool = False  # whether it is a call whose float32 may be computed again
    jumps: bool = False  # whether its result leaps where its operand hardly changes
    view: bool = False  # whether calls in float32 that read its result do it themselves


def is_float32_function(action: Action) -> bool:
    """Whether an action is a function with a rule that is to run in float32."""
    return isinstance(action, Structural) and action.in_float32


def kind_of(action: Action) -> Kind | None:
    """What an elementwise or reducing action is; None for all others."""
    if not isinstance(action, Bind | Structural) or not action.results:
        return None
    if is_float32_function(action):
        return Kind(gives_low=any(value.low for value in action.results))
    if isinstance(action, Structural) and not action.is_call:
        return None
    names = {eqn.primitive.name for eqn in nested([action.eqn])}
    low = [value.low for value in action.results]
    takes_low = any(value.low for value in action.operands)
    if names <= _primitives.ORDERS and takes_low:
        return Kind(gives_low=any(low), compares=True, orders=True)
    exact = names <= _primitives.EXACT
    # Derivative rules of functions are theirs, but for those of exact ones, as of relu.
    fits = exact or names <= _primitives.CHEAP - {"custom_jvp_call"}
    if not fits or any(low) != all(low) or not runs_in_float32([action.eqn]):
        return None
    promotes = action.caster.record.ruling.rule is Rule.PROMOTE
    if low[0] and isinstance(action, Bind) and not (promotes or _adds_bias(action)):
        return None
    scales = isinstance(action, Bind) and _scales_low(action, _is_number)
    again = isinstance(action, Structural) and _is_made_again(action, names)
    return Kind(
        gives_low=low[0],
        exact=exact,
        moves=names <= _primitives.MOVING,
        linear=scales or names <= _primitives.LINEAR,
        scales=scales,
        compares=takes_low and not low[0] and not again,
        again=again,
        jumps=isinstance(action, Bind) and names <= _primitives.STEPS,
        view=not low[0] and (scales or names == {"broadcast_in_dim"}),
        masks=isinstance(action, Bind) and _scales_low(action, _is_of_numbers),
    )


def _adds_bias(action: Bind) -> bool:
    """Whether it adds the bias of a layer to what a CPU's product rounds by itself."""
    on_cpu = action.device_type == "cpu" and action.name == "add"
    return on_cpu and product_and_bias(*action.read) is not None


def _is_made_again(call: Structural, names: set[str]) -> bool:
    """Whether a call's float32 may be computed again with its readers.

    On GPUs it moves more bytes, but for what is smaller than what it was reduced from.
    """
    if call.results[0].dtype != FLOAT32:
        return False
    if call.device_type == "cpu":
        return True
    shapes = [value.aval.shape for value in call.operands]
    reduces = not names.isdisjoint(_primitives.REDUCTIONS | _primitives.SUMS)
    return reduces and call.results[0].aval.shape not in shapes


def _scales_low(action: Bind, known: Callable[[Value], bool]) -> bool:
    name = action.eqn.primitive.name
    values = action.operands[1:] if name == "div" else action.operands
    low = any(value.low for value in action.read)
    return name in _primitives.SCALING and any(map(known, values)) and low


def _is_number(value: Value) -> bool:
    return value.constant is not None


def _is_of_numbers(value: Value) -> bool:
    return value.follows
