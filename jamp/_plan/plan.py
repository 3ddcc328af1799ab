"""A plan: what is to run for a program, step by step, and the casts in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import indent
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp._compat import scan_counts
from jamp._dtypes import FLOAT32, DType
from jamp._plan.records import Record, Ruling
from jamp._plan.values import Traits, Value, Values
from jamp._policy.functions import Function
from jamp._tracing.options import Options
from jamp._tracing.regions import Scope

# An equation, after those whose programs it stands in: of its plan, outermost first.
Lineage = tuple[JaxprEqn, ...]


class Context(NamedTuple):
    """What holds where an equation stands, and for the programs that it holds."""

    scope: Scope  # named scopes and the region
    # The ruling of the listed function they stand in, if it settles them.
    forced: Ruling | None = None
    functions: frozenset[Function] = frozenset()  # listed ones around, planned by now
    # Whether these equations are a derivative rule's, which JAX may transpose: no cast
    # may be left to the caller.
    transposable: bool = False
    tried: bool = False  # whether the plan is a trial: only whether it changes counts
    derived: bool = False  # whether JAX has made these equations by jvp or transpose
    transposed: bool = False  # whether by transpose: values here are cotangents
    # Whether in a loop, which keeps what their backward pass reads for each iteration.
    looped: bool = False

    @property
    def region(self) -> Options:
        return self.scope.options


@dataclass(frozen=True, eq=False)
class Action:
    """A step of a plan: it makes values of others."""

    operands: Values  # the values that it takes
    results: Values  # the values that it makes
    caster: Caster | None  # of the equation that it is for, if any

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def lineage(self) -> Lineage:
        return self.caster.lineage if self.caster else ()

    @property
    def widens(self) -> Sequence[int]:
        """The places of 16-bit operands that it reads in float32.

        It may be handed casts of these, which their gradients go to, as last operands.
        """
        return ()


@dataclass(frozen=True, eq=False)
class Cast(Action):
    """A conversion to the dtype of its result."""

    rounds: bool = False  # whether a rule rounds what was computed in float32
    shared: Sequence[int] = ()  # as of a `Float32Call`

    @property
    def widens(self) -> Sequence[int]:
        return [0] if self.operands[0].low and self.dtype == FLOAT32 else ()

    @property
    def dtype(self) -> DType:
        return self.results[0].dtype


@dataclass(frozen=True, eq=False)
class Broadcast(Action):
    """A broadcast to the shape of its result, in the dtype of its operand."""


@dataclass(frozen=True, eq=False)
class RoundedGradient(Action):
    """A float32 value as it is, whose gradient is rounded to 16 bits."""

    dtype: DType


@dataclass(frozen=True, eq=False)
class Run(Action):
    """Equations that run."""

    caster: Caster

    @property
    def device_type(self) -> str:
        """What the program is for."""
        return self.caster.options.device_type


@dataclass(frozen=True, eq=False)
class Bind(Run):
    """An equation without inner programs."""

    eqn: JaxprEqn
    operand_dtypes: tuple[Any, ...] | None  # if they are others than traced
    read: Values  # its operands before they were cast for it
    # Which operands are casts of weights: these, in float32, are its last operands.
    weights: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def rounded(self) -> tuple[int, ...]:
        """Which operands were cast from float32 by a rule, and not by the program."""
        places = enumerate(self.operands[: len(self.eqn.invars)])
        return tuple(place for place, value in places if value.cast_from is not None)


@dataclass(frozen=True, eq=False)
class Float32Call(Run):
    """Equations that run in the float32 that they were traced in, as one function."""

    eqns: Sequence[JaxprEqn]  # the equations
    invars: Sequence[Any]  # the variables that they read and do not make
    outvars: Sequence[Any]  # those of their results that are wanted
    # For each of `outvars` its cast to 16 bits if that is wanted too; these come last.
    narrowed: Sequence[Cast | None]
    # The places of 16-bit operands whose gradients go to float32 casts that were made
    # elsewhere; these casts come after the operands, in the same order.
    shared: Sequence[int] = ()

    @property
    def name(self) -> str:
        return f"Float32Call({', '.join(e.primitive.name for e in self.eqns)})"

    @property
    def widens(self) -> Sequence[int]:
        return [place for place, v in enumerate(self.operands) if v.low]


@dataclass(frozen=True, eq=False)
class Structural(Run):
    """An equation that holds programs.

    Its operands: the equation's, casts at `slots`, and casts that share a gradient.
    """

    eqn: JaxprEqn
    plans: Sequence[Plan]  # what is to run for its programs
    context: Context  # what holds around it
    kind: str  # the primitive that it is emitted as
    # Whether it is read as a function that runs in the float32 that it was traced in.
    in_float32: bool = False
    shared: Sequence[int] = ()  # as of a `Float32Call`

    @property
    def name(self) -> str:
        return self.kind

    def unshared(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[int, Any]]:
        """What it takes, and casts to share the gradient of, by their operand's place.

        Args:
          arrays: these and those, one after the other.
        """
        stop = len(arrays) - len(self.shared)
        return arrays[:stop], dict(zip(self.shared, arrays[stop:], strict=True))

    @property
    def is_call(self) -> bool:
        """Whether it calls one program, which may be handed float32 for 16 bits."""
        return self.kind in ("jit", "custom_jvp_call")

    @property
    def widens(self) -> Sequence[int]:
        if self.context.transposable:
            return ()
        first = self.first_handed_in
        return [
            place
            for place in self.handed_in
            if self.operands[place].low
            and any(place - first in plan.widened for plan in self.plans)
        ]

    @property
    def first_handed_in(self) -> int:
        """The place of the operand that is the programs' first input."""
        return 1 if self.kind == "cond" else 0

    @property
    def handed_in(self) -> Sequence[int]:
        """The places of operands that the programs take as they are."""
        params, count = self.eqn.params, len(self.eqn.invars)
        if self.kind == "scan":
            consts, carry = scan_counts(params)
            return [*range(consts), *range(consts + carry, count)]
        if self.kind == "cond":
            return range(1, count)
        whole = self.kind in ("jit", "shard_map") or (
            # The backward half of another is one program for JAX, and stays so.
            self.kind == "remat2" and not params["differentiated"]
        )
        return range(count) if whole else ()

    @property
    def slots(self) -> list[int]:
        """Which inputs of the last program the last operands are casts of."""
        return [slot for slot, _ in self.plans[-1].extras]

    @property
    def result_dtypes(self) -> list[Any]:
        return [value.dtype for value in self.results]


def shared_by(action: Action) -> Sequence[int]:
    """The places of what it widens whose gradients go to casts that it is handed."""
    if isinstance(action, Cast | Float32Call | Structural):
        return action.shared
    return ()


def operands_read(action: Action) -> Values:
    """What an action reads: its operands without the casts that it is handed."""
    return action.operands[: len(action.operands) - len(shared_by(action))]


@dataclass(eq=False)
class Plan:
    """What is to run for one program."""

    inputs: Values
    # The numbers of inputs, and of what only arranges their elements anew: those in
    # float32 are weights to the products that read them.
    rearranged_inputs: set[int]
    # Further inputs: casts of inputs, by position and dtype.
    extras: dict[tuple[int, DType], Value] = field(default_factory=dict)
    results: Values = ()
    actions: list[Action] = field(default_factory=list)  # what is to run, in order
    # What made each value, by number; and, of products, the float32 before rounding.
    makers: dict[int, Action] = field(default_factory=dict)
    float32_of_products: dict[int, Value] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)  # what was decided
    changed: bool = False  # whether anything differs from the program as traced
    looped: bool = False  # as of a `Context`

    def __str__(self) -> str:
        """Its steps, a line for each; those of programs that a step holds, indented."""
        lines = [f"take {_listed(self.arguments)}"]
        for action in self.actions:
            made, taken = map(_listed, (action.results, action.operands))
            lines.append(f"{made} = {action.name} {taken}")
            held = action.plans if isinstance(action, Structural) else ()
            lines += [indent(str(plan), "    ") for plan in held]
        return "\n".join([*lines, f"give {_listed(self.results)}"])

    def append(self, action: Action) -> None:
        self.actions.append(action)
        self.makers.update((value.number, action) for value in action.results)

    @cached_property
    def widened(self) -> frozenset[int]:
        """The places of inputs that the actions of a finished plan read in float32."""
        found = {a.operands[place].number for a in self.actions for place in a.widens}
        return frozenset(p for p, v in enumerate(self.inputs) if v.number in found)

    @cached_property
    def unread(self) -> list[list[int]]:
        """For each action of a finished plan, the values that no later one reads."""
        later, unread = {value.number for value in self.results}, []
        for action in reversed(self.actions):
            values = (*action.operands, *action.results)
            found = {value.number for value in values} - later
            unread.append([*found])
            later |= found
        return unread[::-1]

    @cached_property
    def handing_on_sums(self) -> Plan:
        """This plan, of a loop's sums with the float32 that they are kept in."""
        return replace(self, results=[value.kept for value in self.results])

    @property
    def arguments(self) -> Values:
        """What it is handed: its inputs, and after them casts of these."""
        return [*self.inputs, *self.extras.values()]

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        return tuple([value.dtype for value in self.results])

    @property
    def result_traits(self) -> tuple[Traits, ...]:
        return tuple([value.traits for value in self.results])


def _listed(values: Values) -> str:
    return ", ".join(map(repr, values))


def readers_of(plan: Plan) -> dict[int, list[Action | None]]:
    """What reads each value of a plan, by number; None for the plan's caller."""
    readers: dict[int, list[Action | None]] = {}
    for action in plan.actions:
        for value in operands_read(action):
            readers.setdefault(value.number, []).append(action)
    for value in plan.results:
        readers.setdefault(value.number, []).append(None)
    return readers


def needed(
    actions: Sequence[Action],
    results: Values,
    stays: Callable[[Action], bool] = lambda action: False,
    reads: Callable[[Action], Iterable[Value]] = lambda action: action.operands,
) -> list[Action]:
    """Those of some actions that results are made of.

    Args:
      actions: the actions, in order.
      results: what is read of what they make.
      stays: whether an action is kept whoever reads what it makes.
      reads: the values that an action reads.
    """
    read = {value.number for value in results}
    kept: list[Action] = []
    for action in reversed(actions):
        if stays(action) or not read.isdisjoint(v.number for v in action.results):
            kept.append(action)
            read.update(value.number for value in reads(action))
    return kept[::-1]


class Caster:
    """Plans the casts of one equation, each made once and shared."""

    def __init__(self, record: Record, options: Options, plan: Plan, lineage: Lineage):
        self.record = record
        self.options = options
        self.plan = plan
        self.lineage = lineage

    def cast(self, value: Value, dtype: DType, *, rounds: bool = False) -> Value:
        """A value in a dtype; readers in float32 do without a rule's rounding."""
        if value.dtype == dtype:
            return value
        self.plan.changed = True
        if value.constant is not None:
            return value.constant_in(dtype)
        if dtype in value.casts:
            return value.casts[dtype]
        traits = value.traits._replace(sum_dtype=None, origins=frozenset())
        result = Value.of(value.aval, dtype, traits)
        result.cast_from = value if value.dtype == FLOAT32 else None
        share = self.options.cache_enabled
        narrows = dtype.itemsize < value.dtype.itemsize
        if share and narrows and value.slot is not None:
            # The caller casts it, once for all that it is handed to.
            self.plan.extras[value.slot, dtype] = result
        else:
            self.plan.append(Cast((value,), (result,), self, rounds))
        if share:
            value.casts[dtype] = result
            if dtype.itemsize > value.dtype.itemsize:
                # Only the way back from a wider dtype loses nothing.
                result.casts[value.dtype] = value
        return result
