"""What a loop back adds up, and hands on, multiplied behind it for all iterations.

Where a gradient is taken inside autocast, its loop back is one more loop of the
program. Each iteration multiplies a few rows to a matrix as large as the weights, and
adds that to what it carries. All iterations together are one product, and so is what
they hand on to what came in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeGuard

import jax
from jax.sharding import get_abstract_mesh

from jamp._compat import scan_counts
from jamp._dtypes import FLOAT32
from jamp._emit.step_products import (
    ADDED,
    MOST_PER_NUMBER,
    MOST_ROWS,
    is_own_matmul,
    is_worth_all_steps,
    multiplying,
    size_of_value,
)
from jamp._equations.content import is_key
from jamp._equations.walks import contracted
from jamp._lowerings.processor import this_processor
from jamp._plan.biases import moved_wide, moves
from jamp._plan.plan import (
    Action,
    Bind,
    Cast,
    Plan,
    Structural,
    needed,
    operands_read,
    readers_of,
)
from jamp._plan.products import adds_nothing
from jamp._plan.values import Value, Values
from jamp._policy.rules import Rule
from jamp._primitives import ARRANGING

# If the loop stacks nothing else, so many numbers are made behind it for each that it
# stacks for that: the stacks are then most of its memory.
_MADE_ALONE = 12


class HandedOn(NamedTuple):
    """A result of a loop that is made behind it.

    Attributes:
      place: that of the result.
      stack: that of the stack that it is made of.
      of_one: makes it for one iteration, of constants and what that has in the stack.
    """

    place: int
    stack: int
    of_one: Plan


class OfSlice(NamedTuple):
    """A stack of what slices that come in are, cast or moved.

    Attributes:
      place: that of the slices.
      of_one: makes it of one slice.
    """

    place: int
    of_one: Plan


class LoopBack(NamedTuple):
    """A loop, and what is multiplied behind it.

    Attributes:
      within: the loop. What is added up behind it is carried as it comes in.
      kept: the places of the results that it gives; after these it gives stacks.
      of_slices: the first of the stacks that are multiplied.
      sums: of the stacks, what is to be added to what is carried.
      places: where that is.
      handed_on: the other results.
    """

    within: Plan
    kept: Sequence[int]
    of_slices: Sequence[OfSlice]
    sums: Plan
    places: Sequence[int]
    handed_on: Sequence[HandedOn]

    def behind(
        self,
        run: Callable[[Plan, Sequence[Any]], list[Any]],
        given: Sequence[Any],
        consts: Sequence[Any],
        slices: Sequence[Any],
        extras: Sequence[Any],
    ) -> list[Any]:
        """All results.

        Args:
          run: gives the results of a plan.
          given: those of the loop.
          consts: the constants of the loop.
          slices: the stacks of slices that come in.
          extras: casts of constants.
        """

        def for_all(
            plan: Plan,
            stack: Any,
            before: Sequence[Any] = (),
            after: Sequence[Any] = (),
        ) -> Any:
            return jax.vmap(lambda one: run(plan, [*before, one, *after])[0])(stack)

        results = dict(zip(self.kept, given, strict=False))
        made = [for_all(plan, slices[place]) for place, plan in self.of_slices]
        stacks = [*made, *given[len(self.kept) :]]
        for place, total in zip(self.places, run(self.sums, stacks), strict=True):
            results[place] = results[place] + total
        for place, stack, plan in self.handed_on:
            results[place] = for_all(plan, stacks[stack], consts, extras)
        return [results[place] for place in range(len(results))]


def loop_back(action: Structural) -> LoopBack | None:
    """A scan of a backward pass on a CPU in two; None where nothing is gained."""
    if action.device_type != "cpu" or not this_processor().gains:
        return None
    # Other loops that add up are there to have less in memory at a time.
    if not action.context.transposed or action.eqn.effects:
        return None
    if get_abstract_mesh().explicit_axes:
        return None
    (plan,) = action.plans
    return _Loop(plan, *scan_counts(action.eqn.params)).in_two()


def _multiplies(step: Action) -> TypeGuard[Bind]:
    """Whether a step is a matrix product, jamp's own or one that adds nothing up.

    That is one of a single row. Autocast has it in float32, and so its sum.
    """
    if not isinstance(step, Bind) or step.name != "dot_general":
        return False
    ruled = step.caster.record.ruling.rule is not Rule.AS_TRACED
    return is_own_matmul(step) or (ruled and adds_nothing(step.eqn))


class _Loop:
    """A loop of which some products are made behind it."""

    def __init__(self, plan: Plan, consts: int, carry: int) -> None:
        self._plan = plan
        self._consts = plan.inputs[:consts]
        self._carried = plan.inputs[consts:][:carry]
        self._slices = plan.inputs[consts + carry :]
        self._places = {v.number: place for place, v in enumerate(self._slices)}
        self._readers = readers_of(plan)
        # What is only added to what is carried, by number, with its place there.
        self._sums = dict(filter(None, map(self._sum_at, range(carry))))
        # What differs from iteration to iteration.
        self._moving = {value.number for value in plan.inputs[consts:]}
        for step in plan.actions:
            if not self._moving.isdisjoint(v.number for v in step.operands):
                self._moving.update(v.number for v in step.results)
        self._makers = {v.number: step for step in plan.actions for v in step.results}
        # What is multiplied behind the loop, by number; what is equal is one value.
        self._stacked: dict[int, Value] = {}
        self._equal: dict[int, Value] = {}

    def in_two(self) -> LoopBack | None:
        actions: list[Any] = []
        added: dict[int, Value] = {}
        for step in self._plan.actions:
            found = self._for_all(step)
            if found is not None and self._fits(found[0][0].operands):
                made, totals = found
                self._stacked.update((v.number, v) for v in made[0].operands)
                actions += made
                added |= totals
        if not added or not self._spares_enough(added.values()):
            return None
        steps = self._plan.actions
        stacks = sorted(self._stacked.values(), key=self._is_stacked)
        others = [*filter(self._is_stacked, stacks)]
        slices = [*map(self._of_slice, stacks[: len(stacks) - len(others)])]
        handed_on = [*filter(None, map(partial(self._handed_on, stacks), steps))]
        results = [*self._plan.results]
        for place in added:
            results[place] = self._carried[place]
        spared = {found.place for found in handed_on}
        kept = [place for place in range(len(results)) if place not in spared]
        results = [*(results[place] for place in kept), *others]
        sums = replace(
            self._plan,
            inputs=stacks,
            extras={},
            actions=actions,
            results=[*added.values()],
        )
        within = replace(self._plan, actions=needed(steps, results), results=results)
        return LoopBack(within, kept, slices, sums, [*added], handed_on)

    def _sum_at(self, place: int) -> tuple[int, int] | None:
        """What is added to what is carried at a place, and the place."""
        own, new = self._carried[place], self._plan.results[place]
        match self._readers.get(own.number):
            case [Bind(name="add" | "add_any", results=[total]) as add]:
                others = [v for v in add.operands if v.number != own.number]
                alone = all(self._readers[v.number] == [add] for v in others)
                ends = self._readers.get(total.number) == [None]
                if total.number == new.number and ends and alone and len(others) == 1:
                    (term,) = others
                    same = term.aval.shape == own.aval.shape
                    if same and own.dtype == term.dtype == FLOAT32:
                        return term.number, place
        return None

    def _for_all(self, step: Action) -> tuple[list[Bind], dict[int, Value]] | None:
        """A product for all iterations, and what of it is added to which places."""
        if not (_multiplies(step) and self._gains(step)):
            return None
        eqn, (result,) = step.eqn, step.results
        numbers = eqn.params["dimension_numbers"]
        (left, right), batch = [
            [tuple(d + 1 for d in dims) for dims in pair] for pair in numbers
        ]
        numbers = ((0, *left), (0, *right)), tuple(batch)
        total = Value.of(result.aval, FLOAT32)
        product = replace(
            step,
            eqn=eqn.replace(params={**eqn.params, "dimension_numbers": numbers}),
            operands=[self._equal_to(value) for value in step.operands[:2]],
            results=[total],
            weights=(),
        )
        made: list[Bind] = []
        added = self._added(result, total, made)
        return ([product, *made], added) if added else None

    def _added(
        self, value: Value, wide: Value, made: list[Bind]
    ) -> dict[int, Value] | None:
        """What is added to which places, of a value; None if more than that is read.

        Args:
          value: the value in one iteration.
          wide: its sum over all iterations.
          made: what moves that as the value is moved is appended to these.
        """
        found: dict[int, Value] = {}
        left = [(value, wide)]
        while left:
            value, wide = left.pop()
            if value.number in self._sums:
                found[self._sums[value.number]] = wide
                continue
            pairs: list[tuple[Value, Value]] = []
            for reader in self._readers.get(value.number, ()):
                if isinstance(reader, Cast) and reader.dtype == FLOAT32:
                    pairs.append((reader.results[0], wide))
                elif reader is not None and moves(reader):
                    made.append(moved_wide(reader, wide))
                    pairs += zip(reader.results, made[-1].results, strict=True)
                else:
                    return None
            left += reversed(pairs)
        return found

    def _gains(self, product: Bind) -> bool:
        """Whether its factors, of few rows, are far smaller than what it gives."""
        factors, (result,) = product.operands[:2], product.results
        if not all(value.number in self._moving for value in factors):
            return False
        rows: int = math.prod(contracted(product.eqn))
        sizes = sum(map(size_of_value, factors))
        return rows <= MOST_ROWS and ADDED * sizes <= 2 * size_of_value(result)

    def _fits(self, factors: Values) -> bool:
        """Whether stacks of these, too, take little beside what comes in as stacks."""
        stacked = {v.number: v for v in (*self._stacked.values(), *factors)}
        added = filter(self._is_stacked, stacked.values())
        most = MOST_PER_NUMBER * sum(map(size_of_value, self._slices))
        return sum(map(size_of_value, added)) <= most

    def _spares_enough(self, added: Iterable[Value]) -> bool:
        """Whether the loop has stacks anyway, or spares far more than it stacks."""
        if len(self._plan.results) > len(self._carried):
            return True
        stacked = filter(self._is_stacked, self._stacked.values())
        made = sum(map(size_of_value, added))
        return made >= _MADE_ALONE * sum(map(size_of_value, stacked))

    def _is_stacked(self, value: Value) -> bool:
        """Whether the loop has to stack a value, which is made of no slice alone."""
        return self._source_of(value).number not in self._places

    def _source_of(self, value: Value) -> Value:
        """What a value is, before it was cast or moved."""
        while (maker := self._makers.get(value.number)) is not None:
            if not (isinstance(maker, Cast) or moves(maker)):
                break
            value = maker.operands[0]
        return value

    def _of_slice(self, value: Value) -> OfSlice:
        source = self._source_of(value)
        steps = needed(self._plan.actions, [value])
        plan = replace(
            self._plan, inputs=[source], extras={}, actions=steps, results=[value]
        )
        return OfSlice(self._places[source.number], plan)

    def _equal_to(self, value: Value) -> Value:
        """The first value that is made as this one is."""
        number = self._alike.get(value.number, value.number)
        return self._equal.setdefault(number, value)

    @cached_property
    def _alike(self) -> dict[int, int]:
        """By number, of what is made of the same by the same the first's number."""
        firsts: dict[Hashable, int] = {}
        found: dict[int, int] = {}
        for step in self._plan.actions:
            if isinstance(step, Cast):
                made_by: Hashable = step.dtype
            elif isinstance(step, Bind) and step.name in ARRANGING:
                made_by = step.eqn.primitive, tuple(step.eqn.params.items())
            else:
                continue
            made_of = [found.get(v.number, v.number) for v in operands_read(step)]
            for place, value in enumerate(step.results):
                key = made_by, place, tuple(made_of)
                if is_key(key):
                    found[value.number] = firsts.setdefault(key, value.number)
        return found

    def _handed_on(self, stacks: Values, step: Action) -> HandedOn | None:
        """A result that is a product of what is stacked and of a constant matrix."""
        product = multiplying(step, self._moving)
        # Of what is multiplied only the cast is at hand behind the loop.
        if product is None or {*product.action.weights} - {product.place}:
            return None
        if not is_worth_all_steps(product, ADDED):
            return None
        numbers = [value.number for value in stacks]
        number = self._equal_to(product.multiplied).number
        place = self._result_of(*step.results)
        if number not in numbers or place is None:
            return None
        plan = self._of_one(product.multiplied, place)
        return HandedOn(place, numbers.index(number), plan)

    def _result_of(self, value: Value) -> int | None:
        """The place among results that a value, moved or not, alone goes to."""
        while True:
            match self._readers.get(value.number):
                case [Cast(results=[made])]:
                    value = made
                case [Bind(results=[made]) as reader] if moves(reader):
                    value = made
                case [None]:
                    numbers = [value.number for value in self._plan.results]
                    place = numbers.index(value.number)
                    return place if place >= len(self._carried) else None
                case _:
                    return None

    def _of_one(self, multiplied: Value, place: int) -> Plan:
        """A result of one iteration, of what it multiplies to it."""
        results = [self._plan.results[place]]
        maker = self._makers.get(multiplied.number)
        others = [step for step in self._plan.actions if step is not maker]
        inputs = [*self._consts, multiplied]
        actions = needed(others, results)
        return replace(self._plan, inputs=inputs, actions=actions, results=results)
