"""How the values of a plan are read: in their 16 bits, or in float32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _primitives
from jamp._dtypes import FLOAT32, shape_of, size_of
from jamp._equations.walks import holds_any
from jamp._plan.plan import (
    Action,
    Bind,
    Cast,
    Float32Call,
    Plan,
    Structural,
    needed,
)
from jamp._plan.records import Origin
from jamp._plan.turned_products import turned_products
from jamp._plan.unrounded.apart import Apart, apart_from
from jamp._plan.unrounded.kinds import Kind, is_float32_function, kind_of
from jamp._plan.values import Value, Values

# They give what decays over the steps of a loop, as numbers near 1.
_DECAYS = {"exp", "exp2"}
# What has at most one number for so many of another costs few bytes beside it.
_FEW = 16


class Reading(NamedTuple):
    """Which of some values are read in which way, by their places."""

    low: frozenset[int]  # by readers that need their 16 bits
    wide: frozenset[int]  # by readers that would take them in float32
    pinned: frozenset[int] = frozenset()  # rounded, by programs that run apart
    added_up: frozenset[int] = frozenset()  # by readers in float32 that add them up


def taken(action: Action) -> Values:
    """What an action takes, before the casts that were made for it."""
    return action.read if isinstance(action, Bind) else action.operands


def _names(action: Action) -> tuple[str, ...]:
    """What a reader in float32 is called, if it is one of the program's equations."""
    if action.caster is None:
        return ()
    record = action.caster.record
    return (str(record.eqn.params["name"]) if record.entry == "jit" else record.entry,)


def _sums(eqns: Iterable[JaxprEqn]) -> bool:
    return holds_any(eqns, _primitives.SUMS)


def _adds(action: Bind | Structural, lows: set[int]) -> bool:
    """Whether an equation adds two arrays of 16 bits."""
    return action.eqn.primitive.name in ("add", "add_any") and len(lows) == 2


def _numbers_at_others(values: Values, places: Container[int]) -> set[int]:
    """The numbers of 16-bit values that stand anywhere but at some places."""
    return {v.number for p, v in enumerate(values) if v.low and p not in places}


def _small(values: Sequence[Value]) -> set[int]:
    """The places of those that have few numbers beside the largest of them."""
    counts = [size_of(shape_of(value)) for value in values]
    # A dimension whose size is not known yet may be of any.
    sizes = [math.inf if n is None else n for n in counts]
    most = max(sizes, default=0)
    return {p for p, n in enumerate(sizes) if n < math.inf and _FEW * n <= most}


def _live(plan: Plan) -> Plan:
    """A plan without the actions that nobody reads, which XLA drops too.

    Those with effects stay, and those that the policy does not know.
    """

    def stays(action: Action) -> bool:
        return isinstance(action, Bind | Structural) and bool(
            action.eqn.effects or action.caster.record.ruling.origin is Origin.DEFAULT
        )

    def reads(action: Action) -> Iterable[Value]:
        return chain(action.operands, taken(action))

    return replace(plan, actions=needed(plan.actions, plan.results, stays, reads))


class Readers:
    """How each value of a plan is read, given how its results are.

    `of` gives the readers of an inner plan.
    """

    def __init__(
        self, plan: Plan, results: Reading, of: Callable[[Plan, Reading], Readers]
    ):
        self.low = {plan.results[place].number for place in results.low}
        # With the names of these readers, the last in the program first.
        self.wide: dict[int, dict[str, None]] = {
            plan.results[place].number: {} for place in results.wide
        }
        # What programs that run apart, as those of loops and branches, read in 16 bits,
        # moved, scaled or masked: what they make of it is compared with it, or cancels.
        self.pinned = {plan.results[place].number for place in results.pinned}
        # What is added up in float32, maybe after it was multiplied, in any dtype.
        self.added_up = {plan.results[place].number for place in results.added_up}
        # Elementwise actions whose results only readers in float32 have.
        self.unrounded: set[Action] = set()
        self.kind = cache(kind_of)
        self._of = of
        # What is split, as it is or moved; and what is added to other 16 bits.
        self._split: set[int] = set()
        self._added: set[int] = set()
        self._counts: Counter[int] = Counter()
        self._wide_counts: Counter[int] = Counter()
        self.plan = turned_products(_live(plan))
        for action in reversed(self.plan.actions):
            self._add(action)
        self.inputs = self.reading(plan.inputs)

    def reading(self, values: Values) -> Reading:
        """How some values are read, by their places among these."""
        places = [(place, v.number) for place, v in enumerate(values) if v.low]
        return Reading(
            *(
                frozenset(place for place, number in places if number in found)
                for found in (self.low, self.wide, self.pinned, self.added_up)
            )
        )

    def of_call(self, action: Structural) -> tuple[Reading, Reading]:
        """How the results of a call are read, and how it reads its operands.

        What has a derivative rule, as relu, and is read in 16 bits takes these alone:
        of float32 beside them, both would be kept for the backward pass.
        """
        results, (program,) = self.reading(action.results), action.plans
        ruled = action.kind != "jit"
        if ruled:
            results = results._replace(wide=results.wide - results.low)
        inputs = self._of(program, results).inputs
        if ruled:
            inputs = inputs._replace(wide=inputs.wide - inputs.low)
        return results, inputs

    def of_apart(
        self, action: Structural, apart: Apart
    ) -> tuple[Reading, frozenset[int]]:
        """How results of programs that run apart are read; which operands are wide.

        Between a loop, a branch or a shard and its gradient values are kept. Of these
        only what is added up is worth the bytes of float32, as softmax's terms are,
        which cancel in its gradient, what is one array for all iterations, and what
        has few bytes, as the mean and variance of a norm by hand.
        """
        places = frozenset(range(len(action.results)))
        if apart.forward:
            results = Reading(places, frozenset())
            return results, self._read_in_float32(action, apart, results)
        read = self.reading(action.results)
        # Where branches meet in float32, they need not round what they give.
        met = {p for p, v in enumerate(action.results) if v.dtype == FLOAT32}
        # Nothing keeps cotangents; those that are rounded inside are in 16 bits.
        cotangents = read.wide - read.pinned if action.context.transposed else set()
        met |= cotangents | (read.added_up - read.low)
        wide = frozenset(p for p in met if p >= apart.results)
        results = Reading(places - wide, wide, read.pinned & wide, wide)
        # A branch that runs as traced takes what it was traced for.
        if not all(plan.changed for plan in action.plans):
            return results, frozenset()
        inputs = [self._of(plan, results).inputs for plan in action.plans]
        kept = range(apart.inputs, len(action.plans[0].inputs))
        cheap = {
            *range(apart.shared),
            *_small(action.plans[0].inputs).intersection(kept),
        }
        wide_inputs = {
            place
            for found in inputs
            for place in found.added_up.intersection(kept)
            | (found.wide - found.low).intersection(cheap)
        }
        return results, frozenset(place + apart.skipped for place in wide_inputs)

    def _read_in_float32(
        self, action: Structural, apart: Apart, results: Reading
    ) -> frozenset[int]:
        """Which operands stay unrounded: probabilities that nothing reads in 16 bits.

        Of one near 1, rounding leaves nothing of the rest. So are decays, but for those
        of a checkpoint, which saves them. Of others the bytes of float32 are spared.
        """
        if not all(plan.changed for plan in action.plans):
            return frozenset()
        found = [self._of(plan, results).inputs for plan in action.plans]
        low = frozenset().union(*(inputs.low for inputs in found))
        wide = frozenset().union(*(inputs.wide for inputs in found)) - low
        wide = wide.difference(range(apart.shared, apart.inputs))
        return frozenset(
            place
            for place in (inside + apart.skipped for inside in wide)
            if action.operands[place].traits.probability
            or (action.kind != "remat2" and self._decays(action.operands[place]))
        )

    def _decays(self, value: Value) -> bool:
        maker = self.plan.makers.get(value.number)
        lineage = maker.lineage if maker else ()
        return any(eqn.primitive.name in _DECAYS for eqn in lineage[-1:])

    def names(self, number: int) -> list[str]:
        """What reads a value in float32, as far as is known, in program order."""
        return [*reversed(self.wide.get(number, {}))]

    def _widen_apart(self, action: Structural) -> frozenset[int]:
        """Notes what programs that run apart take in float32; returns its places."""
        apart = apart_from(action)
        if apart is None:
            return frozenset()
        _, places = self.of_apart(action, apart)
        numbers = {p: action.operands[p].number for p in places}
        wide = {n for p, n in numbers.items() if action.operands[p].low}
        self._widen(wide, _names(action))
        if not apart.forward:
            first = apart.skipped + apart.inputs
            self.added_up |= wide & {n for p, n in numbers.items() if p >= first}
        return places

    def _widen(self, numbers: Iterable[int], names: Iterable[str]) -> None:
        """Adds readers in float32."""
        added = dict.fromkeys(names)
        for number in numbers:
            self._wide_counts[number] += 1
            self.wide.setdefault(number, {}).update(added)

    def alone(self, value: Value) -> bool:
        """Whether one action only reads a value."""
        return self._counts[value.number] == 1

    def several(self, value: Value) -> bool:
        """Whether several actions read a value in float32."""
        return self._wide_counts[value.number] > 1

    def _add(self, action: Action) -> None:
        lows = {value.number for value in taken(action) if value.low}
        self._counts.update(lows)
        self._add_up(action)
        if isinstance(action, Float32Call) or is_float32_function(action):
            self._widen(lows, _names(action))
        elif isinstance(action, Cast) and action.dtype == FLOAT32:
            self._widen(lows, _names(action))
        elif isinstance(action, Cast):
            self.low |= lows
        elif isinstance(action, Bind | Structural):
            self._add_equation(action, lows)

    def _add_up(self, action: Action) -> None:
        """Follows what is added up in float32 to what it is made of."""
        adds = any(value.number in self.added_up for value in action.results)
        if isinstance(action, Float32Call):
            adds = _sums(action.eqns)
        elif isinstance(action, Cast):
            adds &= action.dtype == FLOAT32
        elif isinstance(action, Bind | Structural):
            adds = (adds or _sums([action.eqn])) and self.kind(action) is not None
        if adds:
            self.added_up.update(value.number for value in action.operands)

    def _is_split_sum(self, kind: Kind, made: set[int], lows: set[int]) -> bool:
        """Whether a sum is split for its readers.

        What it adds would be kept for the backward pass of each part.
        """
        if made.isdisjoint(self._split) and (not kind.moves or len(made) == 1):
            return False
        if kind.moves or kind.scales:
            self._split |= lows
            return False
        return kind.linear

    def _add_equation(self, action: Bind | Structural, lows: set[int]) -> None:
        """Adds how an equation reads its operands, of which some have 16 bits."""
        found = self.kind(action)
        if found is None:
            self._add_operands(action)
            return
        made = {value.number for value in action.results}
        if _adds(action, lows):
            self._added |= lows
        same = found.exact or found.moves or found.masks
        if same and made & self.pinned:
            self.pinned |= lows
            self.low |= lows
        if len(lows) == 1 and (found.compares or found.again):
            # It takes whichever there is.
            self._widen(lows, _names(action))
            return
        if self._is_unrounded(action, found, made, lows):
            self.unrounded.add(action)
            self._widen(lows, chain.from_iterable(self.wide.get(n, ()) for n in made))
            return
        if found.jumps and len(lows) == 1:
            self._widen(lows, _names(action))
            return
        names = self._add_operands(action)
        rounds = found.gives_low and not found.orders
        if found.compares or (rounds and (not found.exact or made & self.wide.keys())):
            self._widen(lows, names)

    def _is_unrounded(
        self, action: Bind | Structural, kind: Kind, made: set[int], lows: set[int]
    ) -> bool:
        """Whether an equation makes 16 bits that only readers in float32 have."""
        alone = not made & self.low and not self._is_split_sum(kind, made, lows)
        alone |= any(value.traits.probability for value in action.results)
        rounds = kind.gives_low and not kind.orders
        kept = _adds(action, lows) and self._is_stream(action, made)
        return rounds and alone and not kept and bool(made & self.wide.keys())

    def _is_stream(self, action: Bind | Structural, made: set[int]) -> bool:
        """Whether a sum goes on through sums, and is read beside them.

        As that of a block and its input is: a GPU would write its float32 for both.
        """
        if action.caster.options.device_type == "cpu":
            return False
        return any(self._counts[number] > 1 for number in made & self._added)

    def _add_operands(self, action: Bind | Structural) -> Sequence[str]:
        """Adds which 16 bits an equation needs, and what its programs take wide.

        Returns:
          What it is called if it reads in float32, unless its program's readers are.
        """
        if isinstance(action, Structural) and action.is_call:
            return self._add_call(action)
        places: Container[int] = ()
        if isinstance(action, Structural):
            places = self._widen_apart(action)
        # Those that are cast for it are read by their casts; what it takes in 16 bits
        # may be what a value that it reads was widened from.
        rounded = _numbers_at_others(action.operands, places)
        self.low |= rounded
        extreme = action.eqn.primitive.name in _primitives.EXTREMES
        if extreme or isinstance(action, Structural):
            self.pinned |= rounded
        return _names(action)

    def _add_call(self, action: Structural) -> Sequence[str]:
        """Adds how the program of a call reads what the call is given."""
        (program,) = action.plans
        results, inputs = self.of_call(action)
        known = self._of(program, results).wide
        numbers = [value.number for value in action.operands]
        names = _names(action)
        for place in inputs.wide:
            inside = known[program.inputs[place].number]
            self._widen([numbers[place]], inside)
            names = () if inside else names
        self.low |= {numbers[place] for place in inputs.low}
        self.pinned |= {numbers[place] for place in inputs.pinned}
        self.added_up |= {numbers[place] for place in inputs.added_up}
        # What nobody reads inside is handed in as it is.
        self.low |= _numbers_at_others(action.operands, inputs.wide)
        return names
