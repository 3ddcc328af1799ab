"""What a rule is handed: one equation, and all that it takes to plan it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._equations import closed
from jamp._plan.casting import Caster
from jamp._plan.context import Context, Environment
from jamp._plan.plan import Bind, Plan, Structural
from jamp._plan.records import InnerRecords, Ruling
from jamp._plan.values import Traits, Value


class Planner(Protocol):
    """What plans programs; see `jamp._plan.planner`."""

    def inline(
        self, program: Any, arguments: Sequence[Value], context: Context, plan: Plan
    ) -> list[Value]:
        """Plans a program as part of the one around it; returns its results."""

    def inner(
        self,
        program: Any,
        operands: Sequence[Value],
        context: Context,
        hoisted: Iterable[int] = (),
    ) -> Plan:
        """Plans a program of its own, once for each combination of inputs."""

    def plan_equations(
        self,
        eqns: Sequence[JaxprEqn],
        start: int,
        env: Environment,
        context: Context,
        plan: Plan,
    ) -> None:
        """Plans equations, the first of which is number `start` of its program."""

    def plan_equation(
        self,
        eqn: JaxprEqn,
        env: Environment,
        context: Context,
        plan: Plan,
        user: Ruling | None = None,
    ) -> None:
        """Plans one equation."""


class Equation(NamedTuple):
    """An equation about to be planned.

    Attributes:
      planner: plans inner programs.
      eqn: the equation as traced.
      operands: its operands, in whatever dtypes they have by now.
      context: what holds around it.
      caster: plans its casts and notes them in its record.
    """

    planner: Planner
    eqn: JaxprEqn
    operands: Sequence[Value]
    context: Context
    caster: Caster

    @property
    def plan(self) -> Plan:
        """What the equation becomes a part of."""
        return self.caster.plan

    def inner(
        self,
        program: Any,
        operands: Sequence[Value],
        *,
        hoisted: Iterable[int] = (),
    ) -> Plan:
        """Plans a program that the equation holds; see `Planner.inner`."""
        return self.planner.inner(closed(program), operands, self.context, hoisted)

    def as_traced(self, traits: Sequence[Traits] = ()) -> list[Value]:
        """Binds the equation as it is; something may be known of its results."""
        results = self._results(map(_dtypes.dtype_of, self.eqn.outvars), traits)
        device_type = self.context.region.device_type
        self.plan.add(Bind(self.operands, results, self.eqn, None, device_type))
        return results

    def calling(
        self,
        inner: Plan,
        operands: Sequence[Value] | None = None,
        *,
        changed: bool = False,
        kind: str | None = None,
    ) -> list[Value]:
        """Binds the equation with another program; as it is, if nothing changes.

        Args:
          inner: what is to run for its program.
          operands: its operands, if they are others by now.
          changed: whether more changes than the program.
          kind: the primitive that it is emitted as, if it is another one.
        """
        self.note(inner)
        if not (inner.changed or changed):
            return self.as_traced(inner.traits)
        self.plan.changed = True
        return self.add([inner], inner.dtypes, operands, inner.traits, kind)

    def add(
        self,
        plans: Sequence[Plan],
        dtypes: Iterable[Any],
        operands: Sequence[Value] | None = None,
        traits: Sequence[Traits] = (),
        kind: str | None = None,
    ) -> list[Value]:
        """Binds the equation with other programs, for results in some dtypes."""
        results = self._results(dtypes, traits)
        taken = self.operands if operands is None else operands
        name = kind or self.eqn.primitive.name
        self.plan.add(Structural(taken, results, self.eqn, plans, self.context, name))
        return results

    def _results(self, dtypes: Iterable[Any], traits: Sequence[Traits]) -> list[Value]:
        known = traits or (None,) * len(self.eqn.outvars)
        return [
            Value.of(var.aval, dtype, found)
            for var, dtype, found in zip(self.eqn.outvars, dtypes, known, strict=True)
        ]

    def extras(self, inputs: Sequence[Value], inner: Plan) -> list[Value]:
        """The casts of a program's first inputs that it leaves to this equation."""
        return [self.caster.cast(inputs[slot], dtype) for slot, dtype in inner.extras]

    def note(self, *plans: Plan) -> None:
        """Records inner programs under the equation."""
        self.note_operands()
        for plan in plans:
            self.plan.entries.append(InnerRecords(self.eqn, plan.entries))
            self.plan.changed |= plan.changed

    def note_operands(self) -> None:
        """Records the dtypes in which operands come."""
        self.caster.record.operands = tuple([v.dtype for v in self.operands])
