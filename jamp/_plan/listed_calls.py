"""Calls of listed functions: what enters, what is computed inside, what leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jamp import _dtypes, _primitives
from jamp._dtypes import FLOAT32, DType
from jamp._equations.walks import followed, is_cheap, nested, read_by, runs_in_float32
from jamp._plan.equation import Environment
from jamp._plan.plan import Caster, Context, Float32Call
from jamp._plan.products import explicit_precision
from jamp._plan.records import Origin, Record, Returned, Ruling, with_inner
from jamp._plan.sums import carried_through
from jamp._plan.values import Numbers, Traits, Value, propagate
from jamp._policy.functions import Function
from jamp._policy.rules import Rule
from jamp._tracing.options import Options
from jamp._tracing.regions import Scope

# What decides inside of a listed function, whatever its rule.
_DECISIVE = {
    Origin.FUNCTION,
    Origin.OPAQUE,
    Origin.PRECISION,
    Origin.REGION,
    Origin.SCOPE,
}


@dataclass(frozen=True, eq=False)
class ListedCall:
    """One call of a listed function, which its policy rules as a whole."""

    function: Function  # the policy's entry
    eqns: Sequence[JaxprEqn]  # its equations, consecutive ones of their program
    start: int  # the number of the first of them
    env: Environment  # values of the program, and its plan
    context: Context  # what holds around the call
    scope: Scope  # the named scopes that the equations stand in
    plan_inside: Callable[[Environment, Context], None]  # plans its equations

    @property
    def stop(self) -> int:
        """The number of the equation that follows it."""
        return self.start + len(self.eqns)

    @property
    def options(self) -> Options:
        return self.scope.options

    @cached_property
    def ruling(self) -> Ruling:
        policy = self.options.policy
        rule = policy.function_rules[self.function]
        return Ruling(rule, Origin.FUNCTION, self.function, policy)

    def caster(self, record: Record, eqn: JaxprEqn) -> Caster:
        source = (*self.env.callers, eqn)
        return Caster(record, self.options, self.env.plan, source)

    @cached_property
    def invars(self) -> list[Any]:
        """The variables that it reads and does not make."""
        made = {var for eqn in self.eqns for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in self.eqns for var in read_by(eqn))
        return [var for var in read if var not in made]

    @cached_property
    def outvars(self) -> dict[Any, JaxprEqn]:
        """The variables that are read after it, and the equations that make them."""
        made = ((var, eqn) for eqn in self.eqns for var in eqn.outvars)
        return {v: eqn for v, eqn in made if self.env.used_from(v, self.stop)}

    @cached_property
    def entered(self) -> dict[Any, Value]:
        """The eligible values that enter it, constants left out."""
        values = {var: self.env.read(var) for var in self.invars}
        return {v: x for v, x in values.items() if x.eligible and not x.follows}

    @cached_property
    def sources(self) -> dict[Any, frozenset[Any]]:
        """Which entering values each value of it is computed from."""
        nothing: frozenset[Any] = frozenset()
        return followed(
            self.eqns,
            {var: frozenset([var]) for var in self.entered},
            lambda eqn, taken: [nothing.union(*taken)] * len(eqn.outvars),
            literal=lambda _: nothing,
            unknown=nothing,
        )

    def leaving_dtype(self, var: Any, dtype: DType) -> DType:
        """The dtype in which a variable, computed in some dtype, leaves the call."""
        rule, policy = self.ruling.rule, self.options.policy
        if rule is Rule.LOWER:
            return self.options.dtype
        if rule not in (Rule.FLOAT32, Rule.INTERNAL_FLOAT32):
            return dtype
        sources = self.sources.get(var, frozenset())
        # Of two calls on one line, which may be taken for one, each has its own.
        values = [self.entered[source] for source in sources]
        traced: DType = var.aval.dtype
        if (
            traced not in {source.aval.dtype for source in sources}
            and _dtypes.eligible(traced)
            and not policy.returns_activation(self.function)
        ):
            # The user named a dtype, as in softmax(x, dtype=...).
            return traced
        if not values:
            return dtype
        rank = max(map(_rank, values))
        # A scalar promotes nothing, and a full reduction need not be rounded.
        if rule is Rule.FLOAT32 or var.aval.ndim == 0 < rank[1]:
            return FLOAT32
        # Running statistics and the like are state, and keep their float32.
        states = (value for value in values if _rank(value) < rank)
        shape = var.aval.shape
        if any(v.dtype == FLOAT32 and v.aval.shape == shape for v in states):
            return FLOAT32
        return _dtypes.widest(v.dtype for v in values if _rank(v) == rank)


def _rank(value: Value) -> tuple[int, int]:
    """The rank of a value, first without its dimensions of size one."""
    return sum(size != 1 for size in value.aval.shape), value.ndim


def plan_listed_call(call: ListedCall) -> None:
    """Plans the equations of a call, and the casts around it, by its rule."""
    env, eqns, records = call.env, call.eqns, call.env.plan.records
    functions = call.context.functions | {call.function}
    context = call.context._replace(functions=functions)
    if _is_left_to_primitives(call):
        call.plan_inside(env, context)
        return
    first = len(records)
    for_equations = call.ruling.for_equations
    enter = call.caster(Record(eqns[0], call.ruling, ()), eqns[0])
    if call.ruling.rule is Rule.LOWER:
        call.plan_inside(env.overlay(_in_16_bits(call.entered, enter)), context)
    elif for_equations.rule is Rule.FLOAT32 and runs_in_float32(eqns):
        _plan_in_float32(call, enter)
    else:
        call.plan_inside(env, context._replace(forced=for_equations))
    made = records[first:]
    # Equations that are planned already: what comes after asks the records for rules.
    for record in with_inner(made):
        if record.ruling == for_equations or record.ruling.origin not in _DECISIVE:
            record.ruling, record.returns = call.ruling, ()
    enter.record = made[0]
    _cast_results(call, made[-1])
    _note_returns(call, made)


def _is_left_to_primitives(call: ListedCall) -> bool:
    """Whether a call is planned as if its function were not listed.

    So is one in 16 bits with a product that stays as traced; one in float32 of
    constants alone, as JAX puts what is known of a call that is differentiated in front
    of a loop; and one that is elementwise only if what it is given multiplies nothing.
    """
    rule, eqns = call.ruling.rule, call.eqns
    if rule is Rule.LOWER:
        products = (e for e in nested(eqns) if e.primitive.name in _primitives.PRODUCTS)
        if any(map(_stays_as_traced, products)):
            return True
    if rule in (Rule.FLOAT32, Rule.INTERNAL_FLOAT32):
        # They are constants still.
        if all(call.env.read(var).follows for var in call.invars):
            return True
    return call.function.elementwise and not _has_no_product(eqns)


def _note_returns(call: ListedCall, records: Sequence[Record]) -> None:
    """Notes which results of its equations leave a call."""
    env = call.env
    for record in records:
        outvars = record.eqn.outvars
        known = record.returns or (None,) * len(outvars)
        record.returns = tuple(
            _returned(env.read(var)) if env.used_from(var, call.stop) else before
            for var, before in zip(outvars, known, strict=True)
        )


def ruling_of_called(
    context: Context, records: Sequence[Record], program: Any
) -> Ruling | None:
    """The ruling of a listed function with derivative rules, which holds in these too.

    They are other functions, so that it is not found in them. Products of a function
    in 16 bits are in 16 bits in its rules anyway.

    Args:
      context: what holds where the function is called.
      records: those of its program.
      program: the program.
    """
    rulings = {record.ruling for record in records}
    if len(rulings) != 1 or context.forced is not None:
        return None
    (ruling,) = rulings
    if ruling.function is None or ruling.rule is Rule.LOWER:
        return None
    known = context.region.policy.function_codes
    lines = [
        f"{code.co_filename}:{code.co_firstlineno}"
        for code, function in known
        if function == ruling.function
    ]
    source = str(program.jaxpr.debug_info.func_src_info)
    if not any(map(source.endswith, lines)):
        return None
    return ruling.for_equations


def _returned(value: Value) -> Returned:
    return Returned(value.number, (value.dtype,))


def _stays_as_traced(product: JaxprEqn) -> bool:
    """Whether a product is one that autocast leaves, with all that it takes."""
    dtypes = map(_dtypes.dtype_of, product.invars[:2])
    return not all(map(_dtypes.eligible, dtypes)) or explicit_precision(product)


def _has_no_product(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether equations multiply no matrices, and float32 in them need not be saved."""
    names = {eqn.primitive.name for eqn in nested(eqns)}
    return names <= _primitives.LINEAR or (is_cheap(eqns) and runs_in_float32(eqns))


def _in_16_bits(entering: dict[Any, Value], caster: Caster) -> dict[Any, Value]:
    """What enters a lowered call in 16 bits: of the highest rank, as activations are.

    What has fewer dimensions, as a bias, is left to the rule of what reads it, so that
    it is broadcast, and its gradient summed, in float32.
    """
    rank = max((value.ndim for value in entering.values()), default=0)
    return {
        var: caster.cast(value, caster.options.dtype)
        for var, value in entering.items()
        if value.ndim == rank
    }


def _plan_in_float32(call: ListedCall, enter: Caster) -> None:
    env, plan = call.env, call.env.plan
    operands = [
        enter.cast(value, FLOAT32) if value.eligible else value
        for value in map(env.read, call.invars)
    ]
    traits = Traits(
        activation=any(v.traits.activation for v in operands if v.rank > 0),
        table=all(v.traits.table for v in operands),
    )
    constants = _constants(call)
    results = [
        Value(var.aval, traits._replace(constants=constants.get(var)))
        for var in call.outvars
    ]
    plan.append(
        Float32Call(
            operands,
            results,
            enter,
            call.eqns,
            call.invars,
            list(call.outvars),
            (None,) * len(results),
        )
    )
    env.bind(call.outvars, results)
    plan.records += _as_traced(call.eqns, call.ruling, call.context.scope)


def _constants(call: ListedCall) -> dict[Any, Numbers | None]:
    """The numbers of those values of a call that are made of constants alone.

    Where JAX cuts a call in two, the second part takes them from the first.
    """
    read = call.env.read
    return followed(
        call.eqns,
        {var: read(var).traits.constants for var in call.invars},
        lambda eqn, taken: [propagate(eqn, taken)] * len(eqn.outvars),
        literal=lambda atom: read(atom).traits.constants,
        unknown=None,
    )


def _as_traced(eqns: Sequence[JaxprEqn], ruling: Ruling, scope: Scope) -> list[Record]:
    """Records of equations that run as traced, and of the programs that they hold."""
    found = []
    for eqn in eqns:
        inner = scope.enter(eqn.source_info.name_stack)
        operands = tuple(map(_dtypes.dtype_of, eqn.invars))
        results = tuple(map(_dtypes.dtype_of, eqn.outvars))
        programs = jaxprs_in_params(eqn.params)
        held = [_as_traced(program.eqns, ruling, inner) for program in programs]
        found.append(Record(eqn, ruling, inner.names, operands, results, inner=held))
    return found


def _cast_results(call: ListedCall, record: Record) -> None:
    """Brings what leaves a call to the dtype that its rule promises."""
    probability = call.options.policy.names_of_unsafe(call.function)
    carried = carried_through(call.eqns, call.entered)
    for var, eqn in call.outvars.items():
        value = call.env.read(var)
        if not value.eligible or value.follows:
            continue
        dtype = call.leaving_dtype(var, value.dtype)
        # A dtype that the user named is not a rule's.
        rounds = _dtypes.dtype_of(var) == FLOAT32
        settled = call.caster(record, eqn).cast(value, dtype, rounds=rounds)
        known = carried.get(var)
        if known and (value.dtype, dtype) == (FLOAT32, known.dtype):
            settled = value.seen(settled, known.origins)
        if probability:
            settled = settled.knowing(probability=probability, rounded_to=None)
        call.env.bind([var], [settled])
