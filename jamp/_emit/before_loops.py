"""Products that a loop makes of its slices and constants alone, made before it.

A recurrent network multiplies what comes in with the same weights at each step, a few
rows at a time. All steps together are one product of many rows, and so is the gradient
of its weights, which the loop would add up step by step.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from jamp import _primitives
from jamp._compat import scan_counts
from jamp._dtypes import size_of
from jamp._emit.recurring import MADE_OF
from jamp._equations import contracted, nested
from jamp._lowerings.hook import has_own_product
from jamp._lowerings.processor import this_processor
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32
from jamp._plan.plan import (
    Action,
    Bind,
    Cast,
    Float32Call,
    Plan,
    Structural,
    needed,
)
from jamp._plan.values import Value, Values
from jamp._tracing.named_axes import in_axes_of_now

# One product for all steps takes less time than one of few rows for each, if a number
# is the sum of at least so many for each row: in training, and without a gradient.
# Where stacks are float32 it gains less.
_MOST_ROWS = 64
_ADDED = 64 if MOVES_BFLOAT16_AS_FLOAT32 else 4
_ADDED_ALWAYS = 64 if MOVES_BFLOAT16_AS_FLOAT32 else 32
# The most numbers that are made before a loop, for each number of its slices.
_MOST = 4
_ELEMENTWISE = _primitives.OF_ONE_DTYPE | _primitives.ARRANGING
_BENDING = _primitives.TRANSCENDENTAL | {"custom_jvp_call", "max", "min"}


class Split(NamedTuple):
    """A loop's plan in two.

    Attributes:
      before: makes products of the loop's constants and of one slice of each stack.
      within: makes the rest, and is handed these products after the slices.
      always: whether this takes less time where no gradient is taken, too.
    """

    before: Plan
    within: Plan
    always: bool

    def stacked(
        self,
        run: Callable[[Plan, Sequence[Any]], list[Any]],
        consts: Sequence[Any],
        slices: Sequence[Any],
        extras: Sequence[Any],
    ) -> list[Any]:
        """The products of all slices, one after the other.

        Args:
          run: gives the results of a plan.
          consts: the constants of the loop.
          slices: the stacks of slices.
          extras: casts of constants.
        """

        def of_one(slices: Sequence[Any]) -> list[Any]:
            return run(self.before, [*consts, *slices, *extras])

        return jax.vmap(of_one)(slices)


def split(action: Structural) -> Split | None:
    """What to make before a scan on a CPU, and the rest of it; None without any."""
    if action.device_type != "cpu" or not this_processor().gains:
        return None
    # What is computed from tangents or cotangents is to be transposed.
    if action.context.derived or action.context.transposable or action.eqn.effects:
        return None
    (plan,) = action.plans
    consts, carry = scan_counts(action.eqn.params)
    slices = plan.inputs[consts + carry :]
    steps = _Steps(plan, plan.inputs[consts : consts + carry], slices)
    made = steps.products()
    if not made:
        return None
    numbers = _numbers(made)
    rest = [a for a in plan.actions if numbers.isdisjoint(_numbers(a.results))]
    before = replace(
        plan,
        inputs=[*plan.inputs[:consts], *slices],
        actions=needed(plan.actions, made),
        results=made,
    )
    within = replace(
        plan, inputs=[*plan.inputs, *made], actions=needed(rest, plan.results)
    )
    return Split(before, within, steps.gain_always)


def differentiated_as(
    run: Callable[..., Any], instead: Callable[..., Any], made_of: Hashable
) -> Callable[..., Any]:
    """A function that runs as one, and is differentiated as another with its results.

    Args:
      run: what runs where no gradient is taken.
      instead: what runs where one is.
      made_of: what it has in common with such a function of an equal call.
    """

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        places = [p for p, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_perturbed(*given: Any) -> Any:
            arrays = dict(enumerate(primals)) | dict(zip(places, given, strict=True))
            return instead(*arrays.values())

        perturbed = [primals[place] for place in places]
        return jax.jvp(of_perturbed, perturbed, [tangents[place] for place in places])

    setattr(rule, MADE_OF, made_of)
    function = jax.custom_jvp(run)
    function.defjvp(in_axes_of_now(rule), symbolic_zeros=True)
    return function


class _Steps:
    """What the steps of a loop are made of, by the numbers of values."""

    def __init__(self, plan: Plan, carried: Values, slices: Values) -> None:
        self._plan = plan
        self._slices = slices
        self._carried = _numbers(carried)
        # Slices, cast and moved.
        self._sliced = _numbers(slices)
        # Products of these and constants, with their biases.
        self._products: set[int] = set()
        # What is not made before the loop, although nothing carried is in it.
        self._fixed: set[int] = set()
        # Whether products made before it take less time without a gradient, too.
        self.gain_always = True
        # What steps read that make no product of these.
        self._read: list[Value] = []
        for step in plan.actions:
            kind = self._kind_of(step)
            if kind is not self._products:
                self._read += step.operands
            if kind is not None:
                kind |= _numbers(step.results)

    def products(self) -> list[Value]:
        """Products that meet what is carried, as the steps read them."""
        found: dict[int, Value] = {}
        most = _MOST * sum(_size(value) for value in self._slices)
        for value in self._read:
            if value.number not in self._products or not self._meets_carry(value):
                continue
            sizes = sum(map(_size, {**found, value.number: value}.values()))
            if sizes <= most:
                found[value.number] = value
        return [*found.values()]

    def _kind_of(self, step: Action) -> set[int] | None:
        """Which of the sets the results of a step belong to; None for constants."""
        if _reads(step, self._carried):
            return self._carried
        if _reads(step, self._fixed):
            return self._fixed
        if _reads(step, self._products):
            return self._products if _adds_bias(step) else self._fixed
        if _reads(step, self._sliced):
            if isinstance(step, Bind) and self._gains(step):
                return self._products
            moves = isinstance(step, Cast) or step.name in _primitives.MOVEMENT
            return self._sliced if moves else self._fixed
        return None

    def _gains(self, step: Bind) -> bool:
        """Whether it multiplies a few rows of a slice with a matrix of constants."""
        dtypes, name = step.operand_dtypes, step.eqn.primitive.name
        if name != "dot_general" or not dtypes or not has_own_product(name, dtypes):
            return False
        factors = step.operands[:2]
        places = [at for at, v in enumerate(factors) if v.number in self._sliced]
        if len(places) != 1:
            return False
        (place,) = places
        shape = factors[place].aval.shape
        if not all(isinstance(n, int) for n in (*shape, *step.results[0].aval.shape)):
            return False
        added = math.prod(contracted(step.eqn))
        rows = math.prod(shape) // max(added, 1)
        gains: bool = rows <= _MOST_ROWS and added >= _ADDED * rows
        self.gain_always &= added >= _ADDED_ALWAYS * rows or not gains
        return gains

    def _meets_carry(self, product: Value) -> bool:
        """Whether a product is added, or the like, to what comes from the carry.

        Otherwise a loop may be there to have less in memory at a time. Where gradients
        alone gain, the sum has to go through a function that is not linear, because a
        loop that is linear may be transposed, as a function with a rule may not.
        """
        followed = {product.number}
        met = False
        for step in self._plan.actions:
            if not _reads(step, followed):
                continue
            names = _names(step)
            met |= _reads(step, self._carried) and names <= _ELEMENTWISE
            if met and (self.gain_always or not names.isdisjoint(_BENDING)):
                return True
            if names <= _ELEMENTWISE:
                followed |= _numbers(step.results)
        return False


def _numbers(values: Iterable[Value]) -> set[int]:
    return {value.number for value in values}


def _size(value: Value) -> int:
    # What is not known yet counts for nothing.
    return size_of(getattr(value.aval, "shape", ())) or 0


def _reads(step: Action, values: set[int]) -> bool:
    return not values.isdisjoint(_numbers(step.operands))


def _adds_bias(step: Action) -> bool:
    sizes = map(_size, step.operands)
    adds = step.name == "add" and _size(step.results[0]) == max(sizes)
    return adds or isinstance(step, Cast)


def _names(step: Action) -> set[str]:
    """The names of a step's primitives."""
    match step:
        case Float32Call():
            eqns = step.eqns
        case Bind() | Structural():
            eqns = [step.eqn]
        case _:
            eqns = []
    return {eqn.primitive.name for eqn in nested(eqns)}
