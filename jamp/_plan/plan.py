"""A plan: what is to run for a program, step by step; and what equations add to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp import _dtypes
from jamp._compat import scan_counts
from jamp._dtypes import FLOAT32, DType
from jamp._equations import closed
from jamp._plan.records import Record, Ruling
from jamp._plan.values import Traits, Value, Values
from jamp._policy.functions import Function
from jamp._tracing.options import Options
from jamp._tracing.regions import Scope

# An equation, after those whose programs it stands in: of its plan, outermost first.
Source = tuple[JaxprEqn, ...]


class Context(NamedTuple):
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
    operands: Values  # the values that it takes
    results: Values  # the values that it makes
    caster: Caster | None  # of the equation that it is for, if any

    @property
    def source(self) -> Source:
        return self.caster.source if self.caster else ()

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
    def rounded(self) -> tuple[int, ...]:
        """Which operands were cast from float32 by a rule, and not by the program."""
        places = enumerate(self.operands[: len(self.eqn.invars)])
        return tuple(place for place, value in places if value.source is not None)


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
        first = 1 if self.kind == "cond" else 0
        return [
            place
            for place in self._handed_in
            if self.operands[place].low
            and any(place - first in plan.widened for plan in self.plans)
        ]

    @property
    def _handed_in(self) -> Sequence[int]:
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


@dataclass(eq=False)
class Plan:
    """What is to run for one program."""

    inputs: Values
    # The numbers of inputs, and of what only arranges their elements anew: those in
    # float32 are weights to the products that read them.
    moved_inputs: set[int]
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

    def append(self, action: Action) -> None:
        self.actions.append(action)
        self.makers.update((value.number, action) for value in action.results)

    @cached_property
    def widened(self) -> frozenset[int]:
        """The places of inputs that the actions of a finished plan read in float32."""
        found = {a.operands[place].number for a in self.actions for place in a.widens}
        return frozenset(p for p, v in enumerate(self.inputs) if v.number in found)

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


class Environment:
    """Values of a program's variables, and the plan that it becomes a part of."""

    def __init__(self, jaxpr: Any, plan: Plan, callers: Source) -> None:
        self.plan = plan
        self.callers = callers  # the equations that it is the program of, in the plan
        self._values: dict[Var, Value] = {}
        self._overlay: Mapping[Var, Value] = {}
        read = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
        self._last_reader = {
            var: index
            for index, atoms in enumerate(read)
            for var in atoms
            if not isinstance(var, Literal)
        }

    def read(self, var: Any) -> Value:
        if isinstance(var, Literal):
            return Value.literal(var)
        return self._overlay.get(var) or self._values[var]

    def overlay(self, values: Mapping[Var, Value]) -> Environment:
        """A view in which some variables read otherwise; it binds into this one."""
        view = copy.copy(self)
        view._overlay = {**self._overlay, **values}
        return view

    def bind(self, variables: Iterable[Any], values: Values) -> None:
        self._values.update(zip(variables, values, strict=True))

    def used_from(self, var: Any, index: int) -> bool:
        """Whether equation `index` or a later one, or the caller, reads a variable."""
        return self._last_reader.get(var, -1) >= index


class Caster:
    """Plans the casts of one equation, each made once and shared."""

    def __init__(self, record: Record, options: Options, plan: Plan, source: Source):
        self.record = record
        self.options = options
        self.plan = plan
        self.source = source

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
        result.source = value if value.dtype == FLOAT32 else None
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


class Equation(NamedTuple):
    eqn: JaxprEqn
    operands: Values  # its operands, in whatever dtypes they have by now
    context: Context  # what holds around it
    caster: Caster
    # Plan a closed program of its own, and one as part of the program around it.
    plan_inner: Callable[[Any, Values, Context, Iterable[int]], Plan]
    plan_inline: Callable[[Any, Values, Context, Plan, Source], list[Value]]

    @property
    def plan(self) -> Plan:
        return self.caster.plan

    def plan_held(
        self, program: Any, operands: Values, hoisted: Iterable[int] = ()
    ) -> Plan:
        given = [value.handed_over for value in operands]
        return self.plan_inner(closed(program), given, self.context, hoisted)

    def bind_as_traced(self, traits: Sequence[Traits] = ()) -> list[Value]:
        """Binds it as it is, which its operands have to fit: see `Plan.changed`."""
        results = self._results(map(_dtypes.dtype_of, self.eqn.outvars), traits)
        taken = self.operands
        self.plan.append(Bind(taken, results, self.caster, self.eqn, None, read=taken))
        return results

    def bind_with(
        self,
        inner: Plan,
        operands: Values | None = None,
        *,
        changed: bool = False,
        kind: str | None = None,
        in_float32: bool = False,
    ) -> list[Value]:
        """Binds the equation with another program; as it is, if nothing changes."""
        self.record_held(inner)
        if not (inner.changed or changed):
            return self.bind_as_traced(inner.result_traits)
        self.plan.changed = True
        dtypes, traits = inner.result_dtypes, inner.result_traits
        return self.bind_programs([inner], dtypes, operands, traits, kind, in_float32)

    def bind_programs(
        self,
        plans: Sequence[Plan],
        dtypes: Iterable[Any],
        operands: Values | None = None,
        traits: Sequence[Traits] = (),
        kind: str | None = None,
        in_float32: bool = False,
    ) -> list[Value]:
        """Binds the equation with other programs, for results in some dtypes."""
        results = self._results(dtypes, traits)
        taken = self.operands if operands is None else operands
        name = kind or self.eqn.primitive.name
        caster, eqn, context = self.caster, self.eqn, self.context
        self.plan.append(
            Structural(taken, results, caster, eqn, plans, context, name, in_float32)
        )
        round_to = partial(self.caster.cast, rounds=True)
        return [value.as_read(round_to) for value in results]

    def _results(self, dtypes: Iterable[Any], traits: Sequence[Traits]) -> list[Value]:
        known = traits or (Traits(data=True),) * len(self.eqn.outvars)
        return [
            Value.of(var.aval, dtype, found).handed_over
            for var, dtype, found in zip(self.eqn.outvars, dtypes, known, strict=True)
        ]

    def hoisted_casts(self, inputs: Values, inner: Plan) -> list[Value]:
        """The casts of a program's first inputs that it leaves to this equation."""
        return [self.caster.cast(inputs[slot], dtype) for slot, dtype in inner.extras]

    def record_held(self, *plans: Plan) -> None:
        """Records what the equation takes, and its inner programs."""
        record = self.caster.record
        record.operands = tuple([v.dtype for v in self.operands])
        record.inner = [plan.records for plan in plans]
        self.plan.changed |= any(plan.changed for plan in plans)
