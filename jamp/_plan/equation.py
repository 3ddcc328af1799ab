"""An equation that is to be planned, and the values that its program has by then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp import _dtypes
from jamp._equations.walks import closed
from jamp._plan.plan import Bind, Caster, Context, Lineage, Plan, Structural
from jamp._plan.values import Traits, Value, Values


class Environment:
    """Values of a program's variables, and the plan that it becomes a part of."""

    def __init__(self, jaxpr: Any, plan: Plan, callers: Lineage) -> None:
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


class Equation(NamedTuple):
    """An equation where it stands; its methods add to the plan around it."""

    eqn: JaxprEqn
    operands: Values  # its operands, in whatever dtypes they have by now
    context: Context  # what holds around it
    caster: Caster
    # Plan a closed program of its own, and one as part of the program around it.
    plan_inner: Callable[[Any, Values, Context, Iterable[int]], Plan]
    plan_inline: Callable[[Any, Values, Context, Plan, Lineage], list[Value]]

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
        known = traits or (Traits(activation=True),) * len(self.eqn.outvars)
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
