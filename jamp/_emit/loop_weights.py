"""Gradients of weights that multiply what a loop carries, made behind the loop back.

A recurrent network multiplies its state with the same weights at each step, a few rows
at a time. The loop back would add up a gradient as large as the weights at each step.
All steps together it is one product.
"""

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jamp._dtypes import shape_of
from jamp._emit.conversions import perturbed
from jamp._emit.emitter import Arrays, Emitter, emits
from jamp._emit.step_products import ByMatrix
from jamp._plan.plan import (
    Action,
    Bind,
    Cast,
    Float32Call,
    Plan,
    needed,
    readers_of,
)
from jamp._plan.values import Value, Values


@dataclass(frozen=True, eq=False)
class Perturbed(Action):
    """Its first operand as it is, which is perturbed as the second is, too."""


class Moved(NamedTuple):
    """A product in a loop, whose change with a weight is made outside.

    Attributes:
      weight: the place of the weight among the results of `Behind.weights`.
      read: the places of what it is made of, among the arguments of `Behind.weights`.
      multiplied: the place of what it multiplies, among what the loop gives for that.
      of_change: makes the change of one step, of what is multiplied there and of the
        change of the weight.
      carrier: the place of the slice that is perturbed by it.
    """

    weight: int
    read: frozenset[int]
    multiplied: int
    of_change: Plan
    carrier: int


class Behind(NamedTuple):
    """A loop whose products of the carry are perturbed from outside.

    Attributes:
      weights: makes the matrices of the loop's constants, and what they are casts of.
      products: the products.
      added: the last of the slices, which are there to be perturbed alone.
      within: the loop. It takes the matrices after its slices, and gives what they
        multiply after its results.
    """

    weights: Plan
    products: Sequence[Moved]
    added: Values
    within: Plan


def made_behind(
    plan: Plan,
    consts: Values,
    slices: Values,
    perturbed: Collection[int],
    recurrent: Sequence[ByMatrix],
    most: int,
) -> Behind | None:
    """A loop of which some products take their weights' gradients from outside.

    Args:
      plan: of the loop.
      consts: its constants, which are the first of its inputs.
      slices: what comes in, which are the last of them.
      perturbed: the places of those that have gradients.
      recurrent: the products.
      most: how many numbers each step may take that are there to be perturbed alone.
    """
    moving = _Moving(plan, consts, slices, perturbed, most)
    for product in recurrent:
        moving.add(product)
    return moving.behind() if moving.products else None


class _Moving:
    """Products whose changes are made outside of a loop, one after the other."""

    def __init__(
        self,
        plan: Plan,
        consts: Values,
        slices: Values,
        perturbed: Collection[int],
        most: int,
    ) -> None:
        self.products: list[Moved] = []
        self._plan = plan
        self._consts = consts
        self._left = most
        self._gradients = _SameGradients(plan)
        of_slices = {place: self._gradients.of(slices[place]) for place in perturbed}
        self._carriers = {found: place for place, found in of_slices.items()}
        self._slices = len(slices)
        self._instead: dict[Action, list[Action]] = {}
        # What products multiply, by number, with its place.
        self._multiplied: dict[int, tuple[int, Value]] = {}
        self._matrices: list[Value] = []
        self._constants: list[Value] = []
        self._added: list[Value] = []

    def add(self, product: ByMatrix) -> None:
        """Moves a product, unless it would need too large a slice of its own."""
        (result,) = product.action.results
        own = [_like(value) for value in product.matrices]
        moved: list[Action] = [product.with_matrices(own)]
        carrier = self._carriers.get(self._gradients.of(result))
        if carrier is None:
            self._left -= math.prod(result.aval.shape)
            if self._left < 0:
                return
            carrier = self._slices + len(self._added)
            self._added.append(Value.of(result.aval, product.multiplied.dtype))
            plain = _like(result)
            moved = [
                replace(moved[0], results=[plain]),
                Perturbed((plain, self._added[-1]), (result,), product.action.caster),
            ]
        self._instead[product.action] = moved
        self._matrices += product.matrices
        self._constants += own
        multiplied = product.multiplied
        place, _ = self._multiplied.setdefault(
            multiplied.number, (len(self._multiplied), multiplied)
        )
        self.products.append(
            Moved(
                len(self._matrices) - 1,
                self._read(product.matrices),
                place,
                product.of_change(self._plan),
                carrier,
            )
        )

    def _read(self, matrices: Values) -> frozenset[int]:
        """Of which constants, and casts of these, matrices are made."""
        plan = _makes(self._plan, self._consts, matrices)
        read = {value.number for step in plan.actions for value in step.operands}
        read.update(value.number for value in matrices)
        return frozenset(p for p, v in enumerate(plan.arguments) if v.number in read)

    def behind(self) -> Behind:
        plan, instead = self._plan, self._instead
        actions = [new for old in plan.actions for new in instead.get(old, [old])]
        results = [*plan.results, *(value for _, value in self._multiplied.values())]
        within = replace(
            plan,
            inputs=[*plan.inputs, *self._added, *self._constants],
            actions=needed(actions, results),
            results=results,
        )
        weights = _makes(plan, self._consts, self._matrices)
        return Behind(weights, self.products, self._added, within)


def _makes(plan: Plan, consts: Values, results: Values) -> Plan:
    """A part of a plan, which makes some results of constants alone."""
    actions = needed(plan.actions, results)
    return replace(plan, inputs=consts, actions=actions, results=results)


def _like(value: Value) -> Value:
    other = Value.of(value.aval, value.dtype, value.traits)
    other.cast_from = value.cast_from
    return other


class _SameGradients:
    """Which values of a program have one gradient, because they are only added up."""

    def __init__(self, plan: Plan) -> None:
        self._readers = readers_of(plan)

    def of(self, value: Value) -> Hashable:
        """Something that is equal for all values with the same gradient."""
        while True:
            match self._readers.get(value.number):
                case [Cast(results=[made])]:
                    value = made
                case [Bind(name="add", results=[made])] if _same_shape(made, value):
                    value = made
                case [Bind(name="split") as split]:
                    return tuple(map(self.of, split.results)), split.eqn.params["axis"]
                case [Float32Call() as call]:
                    numbers = [operand.number for operand in call.operands]
                    return _inside(call, call.invars[numbers.index(value.number)])
                case _:
                    return value.number


def _inside(call: Float32Call, var: Any) -> Hashable:
    """The same inside of a float32 call."""
    while var not in call.outvars:
        readers = [eqn for eqn in call.eqns for v in eqn.invars if v is var]
        if [eqn.primitive.name for eqn in readers] != ["add"]:
            break
        (total,) = readers[0].outvars
        if not _same_shape(total, var):
            break
        var = total
    return call, var


def _same_shape(one: Any, other: Any) -> bool:
    return shape_of(one) == shape_of(other)


@emits(Perturbed)
def _emit_perturbed(emitter: Emitter, action: Perturbed, arrays: Arrays) -> Arrays:
    return [perturbed(*arrays)]
