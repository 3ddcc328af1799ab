"""Equations that run in float32 as one function, and how they come together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Literal, Var

from jamp import _primitives
from jamp._dtypes import FLOAT32, DType, shape_of
from jamp._equations.walks import holds_any, nested
from jamp._plan.plan import Action, Cast, Caster, Float32Call, RoundedGradient
from jamp._plan.values import Value
from jamp._policy.rules import Rule

# Variables of the traced program, and the values that they have.
Bound = Sequence[tuple[Var, Value]]


@dataclass(eq=False)
class Group:
    """Equations that come together, to run in float32 as one function."""

    caster: Caster  # of the last of them
    eqns: list[JaxprEqn] = field(default_factory=list)
    # What enters and what is made, by the numbers of the values.
    inputs: dict[int, tuple[Var, Value]] = field(default_factory=dict)
    made: dict[int, tuple[Var, Value]] = field(default_factory=dict)
    # The casts of what is made in 16 bits too, by the number in float32.
    narrowed: dict[int, Cast] = field(default_factory=dict)
    grows: bool = True  # until something else reads what it makes
    reduces: bool = False
    by_rows: bool = True  # whether it reduces the last dimension alone, if any
    costly: bool = False  # whether it holds more than a few instructions per element

    @property
    def takes_low(self) -> bool:
        """Whether 16 bits enter it."""
        return any(value.low for _, value in self.inputs.values())

    @property
    def takes_one_pass(self) -> bool:
        """Whether a GPU computes it together with what reads it, or shares what enters.

        So it does what is elementwise, and what is cheap and reduces rows alone.
        """
        return self.by_rows and not (self.reduces and self.costly)

    def may_join(self, other: Group) -> bool:
        """Whether another may join: of the same region, in the same program.

        Else what lies between the two, as between a layer and a norm, would be kept for
        the backward pass. Outside of loops a GPU computes again by itself what takes it
        a pass, as a norm over a batch: that is joined in the same named scopes alone.
        """
        if not (self.grows and self.takes_low):
            return False
        mine, its = self.caster, other.caster
        (*outer, eqn), (*others, found) = mine.lineage, its.lineage
        if outer != others:
            return False
        names = eqn.source_info.name_stack, found.source_info.name_stack
        if names[0] == names[1]:
            return True
        anywhere = mine.plan.looped or mine.options.device_type == "cpu"
        return mine.options == its.options and (anywhere or self.takes_one_pass)

    def add(self, eqns: Iterable[JaxprEqn], taken: Bound, made: Bound) -> None:
        """Adds equations that read some variables and make others.

        A value has one variable here, so that its gradients are summed here.
        """
        others: dict[Var, Var] = {}
        for var, value in taken:
            known = self.made.get(value.number) or self.inputs.get(value.number)
            if known is None:
                self.inputs[value.number] = var, value
            elif known[0] is not var:
                others[var] = known[0]
        for eqn in eqns:
            invars = [
                v if isinstance(v, Literal) else others.get(v, v) for v in eqn.invars
            ]
            self.eqns.append(eqn.replace(invars=invars) if others else eqn)
            for inner in nested([eqn]):
                name = inner.primitive.name
                self.costly |= name in _primitives.TRANSCENDENTAL
                self.reduces |= name in _primitives.REDUCTIONS
                self.by_rows &= _is_by_rows(inner)
        self.made.update({value.number: (var, value) for var, value in made})

    def absorb(self, group: Group) -> None:
        """Adds another group; neither reads what the other makes."""
        self.add(group.eqns, [*group.inputs.values()], [*group.made.values()])
        self.narrowed.update(group.narrowed)

    def action(self, read: Collection[int]) -> Float32Call:
        """The call, with those of its results that are read, by their numbers."""
        casts = self.narrowed.items()
        low = {n: cast for n, cast in casts if cast.results[0].number in read}
        kept = {n: made for n, made in self.made.items() if n in read or n in low}
        narrow = [cast.results[0] for cast in map(low.get, kept) if cast is not None]
        return Float32Call(
            [value for _, value in self.inputs.values()],
            [*(value for _, value in kept.values()), *narrow],
            self.caster,
            self.eqns,
            [var for var, _ in self.inputs.values()],
            [var for var, _ in kept.values()],
            list(map(low.get, kept)),
        )


def _is_by_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation that reduces does so along the last of several dimensions."""
    if eqn.primitive.name not in _primitives.REDUCTIONS | _primitives.POOLS:
        return True
    last = len(shape_of(eqn.invars[0])) - 1
    return last > 0 and {*eqn.params.get("axes", ())} == {last}


class Groups:
    """The groups of a plan, by the values with which others may join them."""

    def __init__(self) -> None:
        # By the numbers of what they make, of the 16 bits that they round it to, and of
        # those that they take.
        self._making: dict[int, Group] = {}
        self._rounding: dict[int, Group] = {}
        self._taking: dict[int, Group] = {}
        # Values with a gradient that is rounded, by those that they are.
        self._with_rounded: dict[int, Value] = {}

    def grows(self, number: int) -> bool:
        """Whether the group that makes a value may grow by what reads it."""
        group = self._making.get(number)
        return group is not None and group.grows and group.takes_low

    def with_rounded_gradients(
        self, group: Group, eqns: Sequence[JaxprEqn], read: Bound
    ) -> tuple[list[RoundedGradient], Bound]:
        """What rounds gradients for a GPU, and what equations read then.

        Of functions that the policy has in float32, gradients may cancel.
        """
        caster = group.caster
        in_float32 = caster.record.ruling.rule is Rule.FLOAT32
        if in_float32 or caster.options.device_type == "cpu":
            return [], read
        costly = holds_any(eqns, _primitives.TRANSCENDENTAL)
        rounded, found = [], []
        for var, value in read:
            dtype = self._gradient_dtype(value, group) if costly else None
            if dtype is not None and value.number not in self._with_rounded:
                made = Value.of(value.aval, FLOAT32)
                self._with_rounded[value.number] = made
                rounded.append(RoundedGradient((value,), (made,), caster, dtype))
            # Gradients of others that read it are added up before it is rounded.
            found.append((var, self._with_rounded.get(value.number, value)))
        return rounded, found

    def _gradient_dtype(self, value: Value, group: Group) -> DType | None:
        """The 16 bits that a costly function rounds the gradient of a value to, if any.

        That of what a norm makes is read twice, and what a costly function sends there
        is written for that: in 16 bits, if it is rounded. What joins the norm is
        computed again with it.
        """
        norm = self._making.get(value.number)
        if norm is None or norm.may_join(group):
            return None
        if norm.costly or not norm.reduces:
            return None
        entering = (v for _, v in norm.inputs.values() if v.low)
        shape = value.aval.shape
        return next((v.dtype for v in entering if v.aval.shape == shape), None)

    def read(self, numbers: Iterable[int]) -> None:
        """What makes a value that is read elsewhere does not grow any more."""
        for number in numbers:
            for groups in (self._making, self._rounding):
                if number in groups:
                    groups[number].grows = False

    def joined(
        self, group: Group, numbers: Sequence[int], shares: bool
    ) -> Iterator[Group]:
        """The groups that one joins, which reads what they make, or shares what enters.

        What reads a rounding can't join the group that makes it.
        """
        for number in numbers:
            if number in self._rounding:
                self._rounding[number].grows = False
        for groups in [self._making, self._taking] if shares else [self._making]:
            for found in (groups[number] for number in numbers if number in groups):
                if found.may_join(group):
                    found.grows = False
                    yield found

    def merged(self, group: Group, joined: Sequence[Group]) -> Group:
        """A group with those that it joins, before it has equations of its own.

        The largest takes in the others: a chain would be copied at each of its links.
        """
        grown = max(joined, key=lambda found: len(found.eqns), default=group)
        for found in (found for found in joined if found is not grown):
            grown.absorb(found)
            self._note(grown, found.inputs.values(), found.made)
        grown.caster, grown.grows = group.caster, group.grows
        grown.narrowed.update(group.narrowed)
        return grown

    def add(self, group: Group, read: Bound, made: Bound) -> None:
        """Adds a group that by now reads and makes some more values."""
        self._note(group, read, [value.number for _, value in made])

    def _note(
        self, group: Group, read: Iterable[tuple[Var, Value]], made: Iterable[int]
    ) -> None:
        # Of several groups that take a value, others join the last that came to.
        lows = (value.number for _, value in read if value.low)
        self._taking.update(dict.fromkeys(lows, group))
        casts = group.narrowed
        rounded = [
            casts[number].results[0].number for number in made if number in casts
        ]
        self._making.update(dict.fromkeys(made, group))
        self._rounding.update(dict.fromkeys(rounded, group))

    def round(self, value: Value, cast: Cast) -> bool:
        """Has a group that makes a value round it too, if there is one."""
        group = self._making.get(value.number)
        if group is None or value.number in group.narrowed:
            return False
        # Its gradient enters the call in 16 bits.
        group.narrowed[value.number] = cast
        self._rounding[cast.results[0].number] = group
        return True


def actions_of(
    items: Collection[Action | Group], results: Sequence[Value], wide: Collection[int]
) -> list[Action]:
    """Actions and the calls that groups are, in order.

    Left out are calls, and values by these numbers, that nobody reads.
    """
    read = {value.number for value in results}
    kept: list[Action] = []
    for item in reversed([*items]):
        action = item.action(read) if isinstance(item, Group) else item
        made = {value.number for value in action.results}
        spared = isinstance(item, Group) or not made.isdisjoint(wide)
        if spared and made.isdisjoint(read):
            continue
        read.update(value.number for value in action.operands)
        kept.append(action)
    return kept[::-1]
