"""What a rule is handed: one equation, and all that it takes to plan it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _dtypes
from jamp._dtypes import DType
from jamp._equations import closed
from jamp._plan.plan import Bind, Cast, Context, Plan, Structural
from jamp._plan.records import Conversion, InnerRecords, Record
from jamp._plan.values import Traits, Value, Values
from jamp._tracing.regions import Options


class Caster:
    """Plans the casts of one equation: made once, shared, and noted in its record."""

    def __init__(self, record: Record, options: Options, plan: Plan):
        self.record = record
        self.options = options
        self.plan = plan

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in a dtype; cast once and shared, if sharing is on."""
        if value.dtype == dtype:
            return value
        self.plan.changed = True
        if value.constant is not None:
            return value.constant_in(dtype)
        if dtype in value.casts:
            return value.casts[dtype]
        share = self.options.cache_enabled
        narrows = dtype.itemsize < value.dtype.itemsize
        if share and narrows and value.slot is not None:
            # The caller casts it, once for all that it is handed to.
            result = self._target(value, dtype)
            self.plan.extras[value.slot, dtype] = result
        else:
            self.note(value, dtype)
            result = value.prepared.get(dtype) or self._target(value, dtype)
            if dtype not in value.prepared:
                self.plan.add(Cast((value,), (result,)))
        if share:
            value.casts[dtype] = result
            if not narrows:
                # Only the way back from a wider dtype loses nothing.
                result.casts[value.dtype] = value
        return result

    def _target(self, value: Value, dtype: DType) -> Value:
        traits = value.traits
        if traits.probability and dtype in _dtypes.LOW_DTYPES:
            traits = traits._replace(rounded=dtype)
        return Value.of(value.aval, dtype, traits)

    def note(self, value: Value, dtype: DType) -> None:
        """Notes a cast, also where what takes the value makes it itself."""
        self.plan.changed = True
        self.record.casts.append(Conversion(value.dtype, dtype, value.aval.shape))


class Equation(NamedTuple):
    eqn: JaxprEqn
    operands: Values  # its operands, in whatever dtypes they have by now
    context: Context  # what holds around it
    caster: Caster
    # Plan a closed program of its own, and one as part of the program around it.
    plan_inner: Callable[[Any, Values, Context, Iterable[int]], Plan]
    plan_inline: Callable[[Any, Values, Context, Plan], list[Value]]

    @property
    def plan(self) -> Plan:
        """What the equation becomes a part of."""
        return self.caster.plan

    def inner(
        self, program: Any, operands: Values, hoisted: Iterable[int] = ()
    ) -> Plan:
        return self.plan_inner(closed(program), operands, self.context, hoisted)

    def as_traced(self, traits: Sequence[Traits] = ()) -> list[Value]:
        """Binds the equation as it is; something may be known of its results."""
        results = self._results(map(_dtypes.dtype_of, self.eqn.outvars), traits)
        device_type = self.context.region.device_type
        self.plan.add(Bind(self.operands, results, self.eqn, None, device_type))
        return results

    def calling(
        self,
        inner: Plan,
        operands: Values | None = None,
        *,
        changed: bool = False,
        kind: str | None = None,
    ) -> list[Value]:
        """Binds the equation with another program; as it is, if nothing changes.

        `changed` is whether more changes than the program, `kind` the primitive that it
        is emitted as, if it is another one.
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
        operands: Values | None = None,
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

    def extras(self, inputs: Values, inner: Plan) -> list[Value]:
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
