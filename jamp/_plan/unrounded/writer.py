"""Writes a plan anew, forward: what its readers in float32 take, and what joins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp._dtypes import FLOAT32
from jamp._equations.walks import is_cheap
from jamp._plan.plan import Action, Bind, Cast, Caster, Float32Call, Plan, Structural
from jamp._plan.unrounded.apart import apart_from
from jamp._plan.unrounded.groups import Bound, Group, Groups, actions_of
from jamp._plan.unrounded.kinds import Kind, is_float32_function
from jamp._plan.unrounded.probabilities import Probabilities
from jamp._plan.unrounded.readers import Readers, Reading, taken
from jamp._plan.unrounded.rewritten_records import Rewritten
from jamp._plan.unrounded.same_elements import Elements
from jamp._plan.unrounded.shared_gradients import with_float32_gradients
from jamp._plan.values import Value


def spare_roundings(plan: Plan) -> Plan:
    """The same plan without the roundings that only readers in float32 would see."""
    return _Variants().plan(plan)


class Variant(NamedTuple):
    """A plan written anew for how its results are read and its inputs are at hand."""

    plan: Plan
    wide: frozenset[int]  # which of its 16-bit results it gives in float32
    rounded: frozenset[int]  # which of its results are probabilities that were rounded


class _Variants:
    """The plans of a program, each written once for each way in which it is called."""

    def __init__(self) -> None:
        self.readers = cache(self._readers)
        self.variant = cache(self._variant)

    def _readers(self, plan: Plan, results: Reading) -> Readers:
        return Readers(plan, results, self.readers)

    def _variant(
        self, plan: Plan, read: Reading, wide: frozenset[int], rounded: frozenset[int]
    ) -> Variant:
        if not plan.changed:
            return Variant(plan, frozenset(), frozenset())
        return _Writer(plan, read, self).variant(wide, rounded)

    def plan(self, plan: Plan) -> Plan:
        """A plan of which nothing is known outside."""
        results = Reading(frozenset(range(len(plan.results))), frozenset())
        everything = frozenset(range(len(plan.inputs)))
        return self.variant(plan, results, frozenset(), everything).plan


class _Writer:
    """A plan being written anew, forward."""

    def __init__(self, plan: Plan, results: Reading, variants: _Variants):
        self._results = results
        self._variants = variants
        self._readers = variants.readers(plan, results)
        self._plan = self._readers.plan
        # Each once, in order, without values.
        self._items: dict[Action | Group, None] = {}
        # Casts and views that nothing has read yet, by the number of their result.
        self._prepared: dict[int, Action] = {}
        # What float32 calls that read it do themselves, by the number of its result.
        self._views: dict[int, Bind] = {}
        # Of 16-bit values, by number: the float32 that they were rounded from, or what
        # would make it.
        self._wide: dict[int, Value] = {}
        self._exact: dict[int, Bind] = {}
        # Of float32 values, by number: what is read in their place, and the 16-bit
        # values that they are casts of.
        self._instead: dict[int, Value] = {}
        self._cast_of: dict[int, Value] = {}
        # Float32 values whose numbers 16 bits hold as they are: to round them is none.
        self._exact_in_16_bits: set[int] = set()
        self._elements = Elements(self._readers.kind, self._at_hand)
        self._probabilities = Probabilities(self._at_hand)
        self._groups = Groups()
        self._records = Rewritten(plan.records, self._wide, self._readers.names)

    def variant(self, wide: frozenset[int], rounded: frozenset[int]) -> Variant:
        """For inputs that are at hand, and arguments that may have been rounded."""
        inputs = list(self._plan.inputs)
        self._probabilities.add(self._plan.arguments, rounded)
        for place in wide:
            inputs[place] = self._widened(inputs[place])
        for action in self._plan.actions:
            self._write(action)
            self._probabilities.trace(action)
        outs = [self._instead.get(v.number, v) for v in self._plan.results]
        given = frozenset(p for p in self._results.wide if self._at_hand(outs[p]))
        # What nobody reads outside is there in one dtype, whichever it is.
        unread = {*range(len(outs))} - self._results.low - self._results.wide
        given |= {p for p in unread if outs[p].number in self._wide}
        for place, value in enumerate(outs):
            if place in given:
                outs[place] = self._float32(value)
            self._make(outs[place])
        products = {v.number for v in self._plan.float32_of_products.values()}
        kept = actions_of(self._items, outs, self._wide)
        actions = with_float32_gradients(kept, products)
        groups = [item for item in self._items if isinstance(item, Group)]
        records = self._records.finish(actions, outs, groups)
        plan = replace(
            self._plan, inputs=inputs, results=outs, actions=actions, records=records
        )
        return Variant(plan, given, self._probabilities.places(self._plan.results))

    def _widened(self, value: Value, caster: Caster | None = None) -> Value:
        """What is handed over in float32 in place of a 16-bit value."""
        wide = self._wide[value.number] = Value.of(value.aval, FLOAT32)
        self._prepare(Cast((wide,), (value,), caster, rounds=True))
        return wide

    def _prepare(self, action: Action) -> None:
        """Keeps a cast or a broadcast until something reads it."""
        self._prepared[action.results[0].number] = action

    def _make(self, value: Value) -> Value:
        """A value that is read as it is, with what was prepared for it."""
        value = self._instead.get(value.number, value)
        if value.number in self._prepared:
            self._put(self._prepared.pop(value.number))
        return value

    def _at_hand(self, value: Value) -> bool:
        """Whether the float32 that a 16-bit value was rounded from is to be read."""
        known = value.number in self._wide or value.number in self._exact
        return known and value.number not in self._readers.pinned

    def _float32(self, value: Value) -> Value:
        """The float32 that a 16-bit value was rounded from."""
        if value.number not in self._wide:
            self._put_in_call(self._exact.pop(value.number))
        return self._wide[value.number]

    def _write(self, action: Action) -> None:
        """Writes an action, maybe as a part of a float32 call."""
        if isinstance(action, Bind | Structural):
            self._elements.trace(action, list(map(self._entering, taken(action))))
        if isinstance(action, Float32Call):
            self._call(action)
        elif isinstance(action, Cast):
            self._cast(action)
        elif isinstance(action, Bind | Structural) and self._runs_wide(action):
            self._put_in_call(action)
        elif isinstance(action, Structural):
            self._structural(action)
        elif isinstance(action, Bind):
            self._bind(action)
        else:
            self._prepare(action)

    def _bind(self, action: Bind) -> None:
        found = self._readers.kind(action)
        if found is not None and found.exact:
            made = [value.number for value in action.results]
            if not found.gives_low and all(map(self._is_exact_in_16_bits, action.read)):
                self._exact_in_16_bits.update(made)
            if found.gives_low and any(map(self._at_hand, action.read)):
                self._exact.update(dict.fromkeys(made, action))
        if found is not None and found.view:
            self._views[action.results[0].number] = action
            self._prepare(action)
        else:
            self._put(action)

    def _runs_wide(self, action: Bind | Structural) -> bool:
        """Whether an elementwise action runs in a float32 call from now on.

        Of those that give float32 anyway, what starts a call on 16 bits, or makes one
        larger. Of those that round, what only readers in float32 have, unless more 16
        bits would be kept for it; and what reads something at hand. None of these where
        rounded and unrounded elements of one value would meet.
        """
        found = self._readers.kind(action)
        if found is None:
            return False
        if is_float32_function(action):
            return True
        read = [self._entering(value) for value in taken(action)]
        lows = [value for value in taken(action) if value.low]
        at_hand = all(map(self._at_hand, lows))
        if found.compares or (found.again and at_hand and len(lows) == 1):
            # Where XLA spares the rounding of one alone, what is equal would differ.
            return at_hand
        if not found.gives_low:
            # It computes in float32 anyway. What it adds is not kept beside 16 bits.
            shape = action.results[0].aval.shape
            grows = [self._grows(value) for value in read]
            starts = not found.linear and any(value.low for value in read)
            return (starts or any(grows)) and all(
                grown or value.low or self._is_view(value) or value.aval.shape != shape
                for value, grown in zip(read, grows, strict=True)
            )
        if self._elements.mixes(read):
            return False
        lossy = any(map(self._at_hand, read))
        if action in self._readers.unrounded and not self._saves_more(action, found):
            # What several read is widened once: its gradients meet in float32.
            meet = any(map(self._readers.several, read))
            return lossy or not found.moves or meet or any(map(self._grows, read))
        return lossy and not found.exact

    def _saves_more(self, action: Bind | Structural, found: Kind) -> bool:
        """Whether 16 bits that nothing else reads would be kept instead of a sum."""
        shape = action.results[0].aval.shape
        operands = {self._entering(v) for v in taken(action) if v.aval.shape == shape}
        kept = [v for v in operands if v.low and not self._at_hand(v)]
        return (found.linear or found.exact) and sum(map(self._readers.alone, kept)) > 1

    def _is_view(self, value: Value) -> bool:
        """Whether it repeats or scales another value, as its readers do themselves."""
        return value.number in self._views

    def _is_exact_in_16_bits(self, value: Value) -> bool:
        """Whether 16 bits hold a value's numbers, in whatever dtype, as they are."""
        entering = self._entering(value)
        if entering.low:
            return not self._at_hand(entering)
        return entering.number in self._exact_in_16_bits or not entering.eligible

    def _grows(self, value: Value) -> bool:
        return self._groups.grows(self._wide.get(value.number, value).number)

    def _entering(self, value: Value) -> Value:
        """What a value is, or is a cast of, before any cast for its reader."""
        value = self._instead.get(value.number, value)
        return self._cast_of.get(value.number, value)

    def _input_of_call(self, value: Value) -> Value:
        """What a float32 call takes for a value; 16 bits it casts itself."""
        entering = self._entering(value)
        if self._at_hand(entering):
            return self._float32(entering)
        return entering if self._is_view(entering) else self._make(entering)

    def _put_in_call(self, action: Bind | Structural) -> None:
        """Makes an elementwise action a part of a float32 call."""
        self._probabilities.look_inside(action)
        pairs = zip(action.eqn.invars, taken(action), strict=False)
        eqns, read = self._with_views([action.eqn], pairs)
        found = self._readers.kind(action)
        assert found is not None  # noqa: S101 - only what has a kind is taken
        group = Group(action.caster)
        made = []
        for var, value in zip(action.eqn.outvars, action.results, strict=True):
            wide = value
            if value.low:
                wide = self._wide[value.number] = Value.of(var.aval, FLOAT32)
                if value.number in self._readers.low:
                    group.narrowed[wide.number] = Cast((wide,), (value,), action.caster)
            made.append((var, wide))
        self._add(group, eqns, read, made, shares=found.gives_low)
        if found.gives_low or found.compares or isinstance(action, Structural):
            self._records.put_in_call(action)

    def _with_views(
        self, eqns: Sequence[JaxprEqn], pairs: Iterable[tuple[Any, Value]]
    ) -> tuple[list[JaxprEqn], Bound]:
        """Equations after the views that they read, and what all of them take."""
        views: list[JaxprEqn] = []
        read: list[tuple[Var, Value]] = []
        for var, value in pairs:
            if isinstance(var, Literal):
                continue
            value = self._input_of_call(value)
            if self._is_view(value):
                view = self._views[value.number]
                self._records.view(value)
                inner = zip(view.eqn.invars, view.read, strict=True)
                # It may stand in another program, which has another name for it.
                made, found = self._with_views([view.eqn.replace(outvars=[var])], inner)
                views += made
                read += found
            else:
                read.append((var, value))
        return [*views, *eqns], read

    def _call(self, action: Float32Call) -> None:
        """Writes a float32 call, which takes what is at hand in float32 as it is."""
        cheap, eqns = is_cheap(action.eqns), action.eqns
        read: Bound = list(zip(action.invars, action.operands, strict=True))
        if cheap:
            eqns, read = self._with_views(eqns, read)
        else:
            read = [(var, self._make(value)) for var, value in read]
        made = list(zip(action.outvars, action.results, strict=True))
        self._add(Group(action.caster, grows=cheap), eqns, read, made, joins=cheap)

    def _add(
        self,
        group: Group,
        eqns: Sequence[JaxprEqn],
        read: Bound,
        made: Bound,
        *,
        joins: bool = True,
        shares: bool = False,
    ) -> None:
        """Adds a group of equations, in place of those that it joins."""
        rounded, read = self._groups.with_rounded_gradients(group, eqns, read)
        for action in rounded:
            self._put(action)
        numbers = [value.number for _, value in read]
        joined = [*self._groups.joined(group, numbers, shares)] if joins else []
        for found in joined:
            del self._items[found]
        self._groups.read(numbers)
        group = self._groups.merged(group, joined)
        group.add(eqns, read, made)
        self._groups.add(group, read, made)
        self._items[group] = None

    def _cast(self, action: Cast) -> None:
        (value,), (result,) = action.operands, action.results
        value = self._instead.get(value.number, value)
        if value.low and result.dtype == FLOAT32:
            if self._at_hand(value):
                self._instead[result.number] = self._float32(value)
                return
            self._cast_of[result.number] = value
        elif action.rounds and value.number not in self._exact_in_16_bits:
            self._wide[result.number] = value
        if not (result.low and self._groups.round(value, action)):
            self._prepare(action)

    def _structural(self, action: Structural) -> None:
        if not action.is_call:
            self._apart(action)
            return
        (inner,) = action.plans
        results, inputs = self._readers.of_call(action)
        wide = frozenset(p for p in inputs.wide if self._at_hand(action.operands[p]))
        rounded = self._probabilities.places(action.operands)
        plan, given, made_rounded = self._variants.variant(
            inner, results, wide, rounded
        )
        self._probabilities.add(action.results, made_rounded)
        self._handed(action, [plan], wide, given)

    def _apart(self, action: Structural) -> None:
        """Writes an action whose programs run apart, as those of a loop."""
        apart = apart_from(action)
        if apart is None:
            plans = [self._variants.plan(plan) for plan in action.plans]
            self._records.hold(action, plans)
            self._put(replace(action, plans=plans))
            return
        results, places = self._readers.of_apart(action, apart)
        wide = {p for p in places if self._at_hand(action.operands[p])}
        inputs = frozenset(p - apart.skipped for p in wide)
        others = frozenset(range(len(action.plans[0].inputs))) - inputs
        variants = [
            self._variants.variant(plan, results, inputs, others)
            for plan in action.plans
        ]
        given = {p for found in variants for p in found.wide if action.results[p].low}
        self._handed(action, [found.plan for found in variants], wide, given)

    def _handed(
        self,
        action: Structural,
        plans: Sequence[Plan],
        wide: Collection[int],
        given: Collection[int],
    ) -> None:
        """Writes an action with other plans, some operands and results in float32."""
        operands = [
            self._float32(value) if place in wide else value
            for place, value in enumerate(action.operands)
        ]
        made = [
            self._widened(value, action.caster) if place in given else value
            for place, value in enumerate(action.results)
        ]
        self._records.hold(action, plans)
        self._records.call(action, operands, made)
        self._put(replace(action, plans=plans, operands=operands, results=made))

    def _put(self, action: Action) -> None:
        """Writes an action as it is, with what is now read in place of its operands."""
        operands = list(map(self._make, action.operands))
        self._groups.read(value.number for value in operands)
        if operands != list(action.operands):
            action = replace(action, operands=operands)
        self._items[action] = None
