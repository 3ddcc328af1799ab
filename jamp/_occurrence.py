"""Calls of listed functions: what enters, what is computed inside, what leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from jamp import _dtypes
from jamp._dtypes import FLOAT32, DType
from jamp._emit import Emitter, Scribe, source_of
from jamp._functions import Function
from jamp._plan import primitives
from jamp._records import (
    Cast,
    Entry,
    Group,
    Origin,
    Record,
    Ruling,
    originals,
)
from jamp._regions import Options, Scope
from jamp._rule import Rule
from jamp._rules.matmul import explicit_precision
from jamp._segments import recomputable, run_segment, runs_in_float32
from jamp._values import Value

if TYPE_CHECKING:
    from jamp._interpret import Context, Environment, Interpreter

# Inside a call, these rules settle every equation.
_FORCED = {
    Rule.FLOAT32: Rule.FLOAT32,
    Rule.INTERNAL_FLOAT32: Rule.FLOAT32,
    Rule.PROMOTE: Rule.PROMOTE,
    Rule.AS_TRACED: Rule.AS_TRACED,
    Rule.BANNED: Rule.BANNED,
}


class _Entered(NamedTuple):
    """What enters a call.

    Attributes:
      values: the eligible values, constants left out.
      sources: which of them each value of the call is computed from.
    """

    values: dict[Any, Value]
    sources: dict[Any, frozenset[Any]]


def run_occurrence(
    interpreter: Interpreter,
    function: Function,
    eqns: Sequence[JaxprEqn],
    start: int,
    env: Environment,
    context: Context,
    scope: Scope,
    scribe: Scribe,
) -> None:
    """Runs the equations of one call of a listed function.

    Args:
      interpreter: runs the equations.
      function: the policy's entry.
      eqns: the equations.
      start: the number of the first of them in their program.
      env: values of the program.
      context: what holds around the call.
      scope: the named scopes that the equations stand in.
      scribe: takes the records.
    """
    region = scope.region
    assert region is not None  # noqa: S101 - the root scope always has one
    rule = region.policy.function_rules[function]
    ruling = Ruling(rule, Origin.FUNCTION, function, region.policy.name)
    inner = context._replace(inside=context.inside | {function})
    entered = _entered(eqns, env)
    first = len(scribe.entries)
    if rule is Rule.LOWER:
        if any(map(_has_explicit_precision, eqns)):
            interpreter.run_equations(eqns, start, env, inner, scribe)
            return
        enter = Emitter(Record(eqns[0], ruling, scope.names), region, scribe)
        with source_of(eqns[0]):
            lowered = _lowered(entered.values, enter)
        interpreter.run_equations(eqns, start, env.overlay(lowered), inner, scribe)
        casts = enter.record.casts
    elif _FORCED[rule] is Rule.FLOAT32 and runs_in_float32(eqns):
        casts = _in_float32(eqns, start, entered, env, ruling, context, region, scribe)
    else:
        casts = []
        forced = ruling._replace(rule=_FORCED[rule])
        inner = inner._replace(scope=scope, forced=forced)
        for eqn in eqns:
            interpreter.run_equation(eqn, env, inner, scribe)
    entries = scribe.entries[first:]
    for record in originals(entries):
        if rule is not Rule.LOWER or record.ruling.function is None:
            record.ruling = ruling
    # Records of inner programs serve all their calls; these are of this call alone.
    records = [entry for entry in entries if isinstance(entry, Record)]
    records[0].casts[:0] = casts
    leave, stop = Emitter(records[-1], region, scribe), start + len(eqns)
    _settle(ruling, eqns, stop, entered, env, leave)
    for record in records:
        record.returns = tuple(
            env.read(var).dtype if env.used_from(var, stop) else computed
            for var, computed in zip(record.eqn.outvars, record.results, strict=True)
        )


def _in_float32(
    eqns: Sequence[JaxprEqn],
    start: int,
    entered: _Entered,
    env: Environment,
    ruling: Ruling,
    context: Context,
    region: Options,
    scribe: Scribe,
) -> list[Cast]:
    """Runs a call that is float32 throughout, once its operands are."""
    made = {var for eqn in eqns for var in eqn.outvars}
    read = (v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
    invars = [var for var in dict.fromkeys(read) if var not in made]
    stop = start + len(eqns)
    outvars = [var for eqn in eqns for var in eqn.outvars if env.used_from(var, stop)]
    enter = Emitter(Record(eqns[0], ruling, ()), region, scribe)
    narrow = _narrow_results(outvars, stop, entered, env, ruling, region)
    again = recomputable(eqns) and not context.linear
    with source_of(eqns[0]):
        arrays = [
            _widened(value, enter, again) if value.eligible else value.array
            for value in map(env.read, invars)
        ]
        results, narrowed = run_segment(
            eqns, invars, outvars, arrays, narrow, region.device_type
        )
    values = [Value.of(array) for array in results]
    for value, dtype, array in zip(values, narrow, narrowed, strict=True):
        if dtype is not None:
            value.prepared[dtype] = array
    env.bind(outvars, values)
    scribe.entries.extend(_as_traced(eqns, ruling, context.scope))
    return enter.record.casts


def _narrow_results(
    outvars: Sequence[Any],
    stop: int,
    entered: _Entered,
    env: Environment,
    ruling: Ruling,
    region: Options,
) -> list[DType | None]:
    """The 16-bit dtypes in which results of a float32 call will be wanted next."""

    def wanted(var: Any) -> DType | None:
        dtype = _dtypes.dtype_of(var)
        if not _dtypes.eligible(dtype):
            return None
        leaving = _leaving_dtype(ruling, var, dtype, entered, region)
        reader = env.next_reader(var, stop)
        if leaving == FLOAT32 and reader is not None and _is_lowered(reader, region):
            leaving = region.dtype
        return leaving if leaving in _dtypes.LOW_DTYPES else None

    return list(map(wanted, outvars))


def _is_lowered(eqn: JaxprEqn, region: Options) -> bool:
    name = eqn.primitive.name
    return (
        name in primitives.MATMULS
        and region.policy.primitive_rules.get(name) is Rule.LOWER
        and not explicit_precision(eqn)
    )


def _widened(value: Value, emitter: Emitter, again: bool) -> Any:
    """A value's array in float32, or as it is if the segment itself is to widen it."""
    inside = again and value.dtype in _dtypes.LOW_DTYPES and value.constant is None
    return emitter.left(value, FLOAT32) if inside else emitter.cast(value, FLOAT32)


def _as_traced(
    eqns: Sequence[JaxprEqn], ruling: Ruling, scope: Scope
) -> Iterator[Entry]:
    """Records of equations that ran as traced, and of the programs that they hold."""
    for eqn in eqns:
        inner = scope.enter(eqn.source_info.name_stack)
        record = Record(eqn, ruling, inner.names)
        record.operands = tuple(map(_dtypes.dtype_of, eqn.invars))
        record.results = tuple(map(_dtypes.dtype_of, eqn.outvars))
        yield record
        for program in jaxprs_in_params(eqn.params):
            yield Group(eqn, list(_as_traced(program.eqns, ruling, inner)))


def _entered(eqns: Sequence[JaxprEqn], env: Environment) -> _Entered:
    made = {var for eqn in eqns for var in eqn.outvars}
    found: dict[Any, Value] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if isinstance(var, Literal) or var in made or var in found:
                continue
            value = env.read(var)
            if value.eligible and not value.weak:
                found[var] = value
    return _Entered(found, _sources(eqns, found))


def _lowered(entering: dict[Any, Value], emitter: Emitter) -> dict[Any, Value]:
    """The activations that enter a lowered call, in 16 bits.

    Weights are left to their matmuls, and what is added to the product to its rule, so
    that a bias is broadcast, and its gradient summed, in float32.
    """
    rank = max((value.ndim for value in entering.values()), default=0)
    return {
        var: emitter.converted(value, emitter.region.dtype)
        for var, value in entering.items()
        if value.ndim == rank
    }


def _settle(
    ruling: Ruling,
    eqns: Sequence[JaxprEqn],
    stop: int,
    entered: _Entered,
    env: Environment,
    emitter: Emitter,
) -> None:
    """Brings what leaves a call to the dtype that its rule promises."""
    policy = emitter.region.policy
    function = ruling.function
    probability = function is not None and any(
        function.name in unsafe.of for unsafe in policy.unsafe
    )
    for eqn in eqns:
        for var in eqn.outvars:
            if not env.used_from(var, stop):
                continue
            value = env.read(var)
            if not value.eligible or value.weak:
                continue
            dtype = _leaving_dtype(ruling, var, value.dtype, entered, emitter.region)
            with source_of(eqn):
                settled = emitter.converted(value, dtype)
            if probability:
                rounded = dtype if dtype in _dtypes.LOW_DTYPES else None
                settled.traits = settled.traits._replace(
                    probability=True, rounded=rounded
                )
            env.bind([var], [settled])


def _sources(
    eqns: Sequence[JaxprEqn], entering: dict[Any, Value]
) -> dict[Any, frozenset[Any]]:
    """Which entering values each value of a call is computed from."""
    sources: dict[Any, frozenset[Any]] = {var: frozenset([var]) for var in entering}
    for eqn in eqns:
        union: frozenset[Any] = frozenset().union(
            *(
                sources.get(var, frozenset())
                for var in eqn.invars
                if not isinstance(var, Literal)
            )
        )
        sources.update(dict.fromkeys(eqn.outvars, union))
    return sources


def _leaving_dtype(
    ruling: Ruling,
    var: Any,
    dtype: DType,
    entered: _Entered,
    region: Options,
) -> DType:
    """The dtype in which a variable, computed in some dtype, leaves a call."""
    rule, function, values = ruling.rule, ruling.function, entered.values
    if rule is Rule.LOWER:
        return region.dtype
    if rule not in (Rule.FLOAT32, Rule.INTERNAL_FLOAT32) or not values:
        return dtype
    traced = var.aval.dtype
    came_in = {source.aval.dtype for source in values}
    if (
        traced not in came_in
        and _dtypes.eligible(traced)
        and (function not in region.policy.activation_results)
    ):
        # The user named a dtype, as in softmax(x, dtype=...).
        named: DType = traced
        return named
    if rule is Rule.FLOAT32:
        return FLOAT32
    rank = max(v.ndim for v in values.values())
    for source in entered.sources.get(var, frozenset()):
        state = values[source]
        same = state.ndim < rank and state.aval.shape == var.aval.shape
        if same and state.dtype == FLOAT32:
            # Running statistics and the like are state, and keep their float32.
            return FLOAT32
    return _dtypes.widest(v.dtype for v in values.values() if v.ndim == rank)


def _has_explicit_precision(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in primitives.MATMULS:
        return explicit_precision(eqn)
    return any(
        _has_explicit_precision(inner)
        for program in jaxprs_in_params(eqn.params)
        for inner in program.eqns
    )
