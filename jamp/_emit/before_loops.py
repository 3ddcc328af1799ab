"""What a loop multiplies that can be multiplied before it, and changed from outside.

A recurrent network multiplies what comes in with the same weights at each step, a few
rows at a time. All steps together are one product of many rows, and so is the gradient
of its weights, which the loop would add up step by step. The gradient of the weights
that multiply its state is one such product, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from jamp import _primitives
from jamp._compat import scan_counts
from jamp._emit.loop_weights import Behind, made_behind
from jamp._emit.recurring import MADE_OF
from jamp._emit.step_products import (
    ADDED,
    MOST_PER_NUMBER,
    ByMatrix,
    is_worth_all_steps,
    multiplying,
    size_of_value,
)
from jamp._equations.walks import nested
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

# As `ADDED`: in training, if what it is added to is no product of the carry, whose
# weights' gradients are made behind the loop; and without a gradient.
_ADDED_ALONE = 64 if MOVES_BFLOAT16_AS_FLOAT32 else 4
_ADDED_ALWAYS = 64 if MOVES_BFLOAT16_AS_FLOAT32 else 32
_ELEMENTWISE = _primitives.OF_ONE_DTYPE | _primitives.ARRANGING
_BENDING = _primitives.TRANSCENDENTAL | {"custom_jvp_call", "max", "min"}


class Split(NamedTuple):
    """A loop's plan in two.

    Attributes:
      before: makes products of the loop's constants and of one slice of each stack.
      within: makes the rest, and is handed these products after the slices.
      always: whether this takes less time where no gradient is taken, too.
      consts: the constants of the loop.
      slices: what comes in, and after that these products.
      recurrent: products whose weights' gradients may be made behind the loop.
    """

    before: Plan
    within: Plan
    always: bool
    consts: Values
    slices: Values
    recurrent: Sequence[ByMatrix]

    def behind(self, perturbed: Collection[int]) -> Behind | None:
        """The loop where a gradient is taken, if some of that is made behind it.

        Args:
          perturbed: the places of the slices with gradients.
        """
        made = len(self.slices) - len(self.before.results)
        given = {*perturbed, *range(made, len(self.slices))}
        plan, first = self.within, len(self.consts)
        entering = plan.inputs[first : len(plan.inputs) - len(self.before.results)]
        # A stack of float32 that nothing else needs takes longer than it saves.
        worth = bool(given) or not MOVES_BFLOAT16_AS_FLOAT32
        most = MOST_PER_NUMBER * sum(map(size_of_value, entering)) if worth else 0
        return made_behind(plan, self.consts, self.slices, given, self.recurrent, most)

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

        if not self.before.results:
            return []
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
    carried, slices = plan.inputs[consts:][:carry], plan.inputs[consts + carry :]
    steps = _Steps(plan, carried, slices, ADDED)
    recurrent = steps.recurrent()
    if not recurrent and _ADDED_ALONE != ADDED:
        steps = _Steps(plan, carried, slices, _ADDED_ALONE)
    made = steps.products()
    if not (made or recurrent):
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
    always = bool(made) and steps.gain_always
    slices = [*slices, *made]
    return Split(before, within, always, plan.inputs[:consts], slices, recurrent)


def differentiated_as(
    run: Callable[..., Any],
    derivative: Callable[..., tuple[Any, Any]],
    made_of: Hashable,
) -> Callable[..., Any]:
    """A function that runs as one, and is differentiated as another with its results.

    Args:
      run: what runs where no gradient is taken.
      derivative: what runs where one is: of the arrays, and of tangents by the places
        of those that are perturbed, it gives results and their tangents.
      made_of: what it has in common with such a function of an equal call.
    """

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        pairs = enumerate(tangents)
        perturbed = {p: t for p, t in pairs if not isinstance(t, SymbolicZero)}
        return derivative(primals, perturbed)

    setattr(rule, MADE_OF, made_of)
    function = jax.custom_jvp(run)
    function.defjvp(in_axes_of_now(rule), symbolic_zeros=True)
    return function


class _Steps:
    """What the steps of a loop are made of, by the numbers of values."""

    def __init__(self, plan: Plan, carried: Values, slices: Values, added: int) -> None:
        self._plan = plan
        self._slices = slices
        self._added = added
        self._handed_on = carried
        self._carried = _numbers(carried)
        # Slices, cast and moved.
        self._sliced = _numbers(slices)
        # Products of these and constants, with their biases.
        self._products: set[int] = set()
        # What is not made before the loop, although nothing carried is in it.
        self._fixed: set[int] = set()
        self._recurrent: list[ByMatrix] = []
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
        most = MOST_PER_NUMBER * sum(size_of_value(value) for value in self._slices)
        for value in self._read:
            if value.number not in self._products or not self._meets_carry(value):
                continue
            sizes = sum(map(size_of_value, {**found, value.number: value}.values()))
            if sizes <= most:
                found[value.number] = value
        return [*found.values()]

    def recurrent(self) -> list[ByMatrix]:
        """Products of what is carried with matrices of constants, of a few rows.

        A loop that is linear in them may be transposed, as a function with a rule may
        not.
        """
        return [p for p in self._recurrent if self._bends(*p.action.results)]

    def _bends(self, product: Value) -> bool:
        """Whether a product goes through a function that is not linear, in any step."""
        reached, count = {product.number}, 0
        while count < len(reached):
            count = len(reached)
            for step in self._plan.actions:
                if _reads(step, reached):
                    if not _names(step).isdisjoint(_BENDING):
                        return True
                    reached |= _numbers(step.results)
            pairs = zip(self._handed_on, self._plan.results, strict=False)
            reached |= {own.number for own, new in pairs if new.number in reached}
        return False

    def _kind_of(self, step: Action) -> set[int] | None:
        """Which of the sets the results of a step belong to; None for constants."""
        if _reads(step, self._carried):
            self._add_recurrent(step)
            return self._carried
        if _reads(step, self._fixed):
            return self._fixed
        if _reads(step, self._products):
            return self._products if _adds_bias(step) else self._fixed
        if _reads(step, self._sliced):
            product = multiplying(step, self._sliced)
            if product and is_worth_all_steps(product, self._added):
                self.gain_always &= is_worth_all_steps(product, _ADDED_ALWAYS)
                return self._products
            moves = isinstance(step, Cast) or step.name in _primitives.MOVEMENT
            return self._sliced if moves else self._fixed
        return None

    def _add_recurrent(self, step: Action) -> None:
        product = multiplying(step, self._carried)
        others = self._sliced | self._products | self._fixed
        if product is None or _reads(step, others):
            return
        if is_worth_all_steps(product, self._added):
            self._recurrent.append(product)

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


def _reads(step: Action, values: set[int]) -> bool:
    return not values.isdisjoint(_numbers(step.operands))


def _adds_bias(step: Action) -> bool:
    sizes = map(size_of_value, step.operands)
    adds = step.name == "add" and size_of_value(step.results[0]) == max(sizes)
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
