"""The loop over equations: which rule holds for each, in the order of precedence.

Equations that hold programs are left to `jamp._plan.programs` and
`jamp._plan.custom_functions`, calls of listed functions to `jamp._plan.listed_calls`.
"""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jamp._compat import is_plain_array, transformations
from jamp._dtypes import FLOAT32, LOW_DTYPES, DType, eligible, exceeds_16_bits
from jamp._errors import BannedOpError, JampWarning
from jamp._plan.equation import Environment, Equation
from jamp._plan.listed_calls import ListedCall, plan_listed_call
from jamp._plan.placed import Placed, by_call
from jamp._plan.plain_equations import (
    plan_as_traced,
    plan_convert,
    plan_plain,
    plan_rounding,
    rounds_nothing,
)
from jamp._plan.plan import Cast, Caster, Context, Lineage, Plan
from jamp._plan.products import adds_nothing
from jamp._plan.programs import STRUCTURAL, TAKING_REFERENCES, StructuralRule
from jamp._plan.records import Origin, Record, Returned, Ruling
from jamp._plan.unrounded import spare_roundings
from jamp._plan.values import Traits, Value, Values
from jamp._policy.policy import Policy
from jamp._policy.rules import RECIPROCAL, Rule
from jamp._tracing import locations
from jamp._tracing.options import Options
from jamp._tracing.regions import AGAIN, Scope, scope_names
from jamp._tracing.users_casts import is_kept_cast, is_reshard


def make_plan(program: Any, arrays: Sequence[Any], options: Options) -> Plan:
    """Plans a closed jaxpr for some arrays, of which only dtypes count."""
    inputs = inputs_like(program, arrays)
    return plan_program(program, inputs, Context(Scope((), options)))


def warn_unmatched(policy: Policy) -> None:
    """Warns of patterns for scopes in which nothing stands of what was traced first."""
    if policy.unmatched:
        warnings.warn(
            f"no operation of the first function traced with policy {policy.name} "
            "stands in a scope that matches "
            f"{' or '.join(map(repr, sorted(policy.unmatched)))}; later functions are "
            "not checked. jamp.explain(fn)(...) lists the scopes that a function has",
            JampWarning,
            stacklevel=locations.users_level(),
        )
        policy.unmatched.clear()


def inputs_like(program: Any, arrays: Sequence[Any]) -> list[Value]:
    """A closed jaxpr's inputs, with the dtypes of some arrays."""
    dtypes = [getattr(jax.typeof(array), "dtype", None) for array in arrays]
    return [
        Value.of(aval, dtype, Traits(activation=dtype in LOW_DTYPES))
        for aval, dtype in zip(program.in_avals, dtypes, strict=True)
    ]


def plan_program(
    program: Any, inputs: Values, context: Context, dtypes: Iterable[Any] = ()
) -> Plan:
    """The plan of a program, whose first results are asked for in some dtypes."""
    plan = _Planner().plan(program, inputs, context)
    plan.results = [
        value.kept if dtype == FLOAT32 else value
        for value, dtype in zip_longest(plan.results, dtypes)
    ]
    return spare_roundings(plan)


class _Planner:
    def __init__(self) -> None:
        self._inner: dict[Any, tuple[Plan, Any]] = {}
        self._warned = False
        self._callers: list[JaxprEqn] = []
        # Calls of layers in which code runs that they were handed.
        self._opened: set[Hashable] = set()
        # Found anew for each program: modules are imported and reloaded.
        self._listed: dict[Policy, locations.Listed] = {}
        # Of equations, which are placed again for each listed function around them.
        self._keys: dict[JaxprEqn, locations.FrameKey | None] = {}
        self._scopes: dict[JaxprEqn, tuple[Scope, Scope]] = {}

    def plan(self, program: Any, inputs: Values, context: Context) -> Plan:
        plan = Plan(inputs, {value.number for value in inputs}, looped=context.looped)
        seen = [value.as_read(partial(_rounded, plan)) for value in inputs]
        plan.results = self.inline(program, seen, context, plan, ())
        order = sorted(plan.extras, key=lambda extra: (extra[0], extra[1].name))
        plan.extras = {extra: plan.extras[extra] for extra in order}
        # What comes in narrower may go out again without any equation having changed.
        plan.changed |= any(
            value.dtype != getattr(aval, "dtype", None)
            for value, aval in zip(inputs, program.in_avals, strict=True)
        )
        return plan

    def inner(
        self,
        program: Any,
        operands: Values,
        context: Context,
        hoisted: Iterable[int] = (),
    ) -> Plan:
        """Plans an inner program, once for the dtypes and traits of its inputs.

        The narrowing casts of `hoisted` inputs are left to the caller, so that a value
        that enters several programs, or a loop, is cast once.
        """
        slots = frozenset(hoisted)
        known = tuple((value.dtype, value.traits) for value in operands)
        # What is closed for this call is another object at each.
        ids = id(program.jaxpr), *map(id, program.consts)
        key = (ids, known, context, slots)
        if key not in self._inner:
            inputs = [
                Value(v.aval, v.traits, slot=slot if slot in slots else None)
                for slot, v in enumerate(operands)
            ]
            # The program is held too, so that its id stays taken.
            self._inner[key] = (self.plan(program, inputs, context), program)
        return self._inner[key][0]

    def inline(
        self,
        program: Any,
        arguments: Values,
        context: Context,
        plan: Plan,
        callers: Lineage,
    ) -> list[Value]:
        jaxpr = program.jaxpr
        env = Environment(jaxpr, plan, callers)
        consts = [Value(jax.typeof(const), array=const) for const in program.consts]
        env.bind(jaxpr.constvars, consts)
        env.bind(jaxpr.invars, arguments)
        self._plan_equations(jaxpr.eqns, 0, env, context)
        return [env.read(var) for var in jaxpr.outvars]

    def _plan_equations(
        self, eqns: Sequence[JaxprEqn], start: int, env: Environment, context: Context
    ) -> None:
        """Plans equations, the first of which is number `start` of its program."""
        for group in by_call(self._placed(eqns, context), start, env):
            eqn, scope, user, call, _ = group[0]
            if call is None:
                self._plan_equation(eqn, env, context._replace(scope=scope), user)
            else:
                own = tuple([one.eqn for one in group])
                inside = partial(self._plan_equations, own, start)
                plan_listed_call(
                    ListedCall(call.function, own, start, env, context, scope, inside)
                )
            start += len(group)

    def _placed(self, eqns: Sequence[JaxprEqn], context: Context) -> list[Placed]:
        known = None
        # A layer may have begun before the code that it was handed.
        while known != len(self._opened):
            known = len(self._opened)
            placed = [self._place(eqn, context) for eqn in eqns]
        return placed

    def _place(self, eqn: JaxprEqn, context: Context) -> Placed:
        scope = self._scope_of(eqn, context.scope)
        user = user_ruling(scope)
        if user is not None or context.forced is not None:
            return Placed(eqn, scope, user)
        key = self._key_of(eqn)
        if key is None:
            self._warn_no_traceback()
            return Placed(eqn, scope)
        for call in self._functions(scope.options.policy).calls(key):
            if call.function in context.functions or call.key in self._opened:
                continue
            if not (call.function.own_code and locations.is_others(eqn, call)):
                return Placed(eqn, scope, None, call, key)
            self._opened.add(call.key)
        return Placed(eqn, scope, None, None, key)

    def _scope_of(self, eqn: JaxprEqn, around: Scope) -> Scope:
        known = self._scopes.get(eqn)
        if known is None or known[0] is not around:
            known = around, around.enter(eqn.source_info.name_stack)
            self._scopes[eqn] = known
        return known[1]

    def _key_of(self, eqn: JaxprEqn) -> locations.FrameKey | None:
        if eqn not in self._keys:
            # The user's own line asks for a cast, wherever JAX makes it.
            self._keys[eqn] = locations.frame_key(eqn, users=is_kept_cast(eqn))
        return self._keys[eqn]

    def _functions(self, policy: Policy) -> locations.Listed:
        if policy not in self._listed:
            self._listed[policy] = locations.Listed(policy.function_codes)
        return self._listed[policy]

    def _warn_no_traceback(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the program was traced without tracebacks, so that functions such "
                "as softmax cannot be recognised in it and only the rules of "
                "primitives hold; hand jamp the function, not a jaxpr made elsewhere",
                JampWarning,
                stacklevel=locations.users_level(),
            )

    def _plan_equation(
        self, eqn: JaxprEqn, env: Environment, context: Context, user: Ruling | None
    ) -> None:
        """Plans one equation under the rule that holds for it: the user's, if any."""
        operands = [env.read(var) for var in eqn.invars]
        ruling = context.forced if user is None else user
        unsafe = ""
        if ruling is None:
            policy = context.region.policy
            unsafe = self._unsafe(eqn, operands, policy)
            ruling = primitive_ruling(eqn, operands, policy)
        if ruling.rule is Rule.BANNED:
            what = ruling.function.name if ruling.function else eqn.primitive.name
            raise BannedOpError(
                f"{self._where(eqn)}: {what} is banned ({ruling.source}); compute it "
                "in a region with jamp.autocast(enabled=False), or write it in a way "
                "that the policy allows"
            )
        record = Record(eqn, ruling, context.scope.names, unsafe=unsafe)
        env.plan.records.append(record)
        env.plan.changed |= bool(unsafe)
        name = eqn.primitive.name
        converts = name == "convert_element_type" and not is_reshard(eqn)
        rule: StructuralRule = plan_convert if converts else plan_plain
        if name == "reduce_precision":
            rule = plan_rounding
        if name in STRUCTURAL:
            rule = STRUCTURAL[name]
            context = _derived(eqn, context)
            others = not all(is_plain_array(v.aval) for v in operands)
            if others and name not in TAKING_REFERENCES:
                rule = plan_as_traced
            elif user is None and ruling.rule is not Rule.PROMOTE:
                # What the user set holds inside by the scope, until a region ends it.
                context = context._replace(forced=ruling)
        self._callers.append(eqn)
        caster = Caster(record, context.region, env.plan, (*env.callers, eqn))
        equation = Equation(eqn, operands, context, caster, self.inner, self.inline)
        try:
            results = rule(equation)
        finally:
            self._callers.pop()
        record.results = tuple([v.dtype for v in results])
        record.returns = tuple([Returned(v.number, (v.dtype,)) for v in results])
        env.bind(eqn.outvars, results)

    def _where(self, eqn: JaxprEqn) -> str:
        around = map(locations.location, (eqn, *reversed(self._callers)))
        return str(next(filter(None, around), "unknown location"))

    def _unsafe(self, eqn: JaxprEqn, operands: Values, policy: Policy) -> str:
        """Why an equation is banned if a reader's rounding turns out to be real."""
        for unsafe in policy.unsafe:
            if eqn.primitive.name in unsafe.primitives and any(
                known.rounded_to == unsafe.dtype and known.probability & {*unsafe.of}
                for known in (operand.traits for operand in operands)
            ):
                return (
                    f"{self._where(eqn)}: {eqn.primitive.name} of a probability that "
                    f"was rounded to {unsafe.dtype.name} is unsafe: {unsafe.advice}"
                )
        return ""


def _derived(eqn: JaxprEqn, context: Context) -> Context:
    """What holds in an equation's programs if it came of differentiating something."""
    found = transformations(eqn)
    transposed = context.transposed or "transpose" in found
    # On the way back a checkpoint computes what was computed before.
    if AGAIN in scope_names(eqn.source_info.name_stack):
        transposed = False
    derived = context.derived or transposed or "jvp" in found
    return context._replace(derived=derived, transposed=transposed)


def _rounded(plan: Plan, value: Value, low: DType) -> Value:
    plan.changed = True
    narrow = Value.of(value.aval, low, value.traits)
    plan.append(Cast((value,), (narrow,), None, rounds=True))
    return narrow


def user_ruling(scope: Scope) -> Ruling | None:
    """The rule that a region or scope of the user's sets, which beats all others."""
    policy = scope.options.policy
    # Which patterns have matched is noted where a region decides, too.
    found = policy.scope_rule(scope.names) if policy.scopes else None
    if not scope.options.enabled:
        return Ruling(Rule.AS_TRACED, Origin.REGION, scope.options.source)
    return found and Ruling(found[1], Origin.SCOPE, found[0], policy)


def primitive_ruling(eqn: JaxprEqn, operands: Values, policy: Policy) -> Ruling:
    """The rule of a policy for an equation that stands in no listed function."""
    name = eqn.primitive.name
    rules = policy.primitive_rules
    if name == "div" and operands[0].follows and not operands[1].follows:
        name = RECIPROCAL if RECIPROCAL in rules else name
    rule = rules.get(name)
    if rule is None:
        return Ruling(Rule.AS_TRACED, Origin.DEFAULT, name, policy)
    why = _promoted(eqn, operands) if rule is Rule.LOWER else None
    if rule is Rule.AS_TRACED and rounds_nothing(eqn):
        why = Origin.IDENTITY
    if why is not None:
        return Ruling(Rule.PROMOTE, why, name, policy)
    return Ruling(rule, Origin.PRIMITIVE, name, policy)


def _promoted(eqn: JaxprEqn, operands: Values) -> Origin | None:
    """Why a product promotes although the policy lowers its primitive, if it does."""
    if adds_nothing(eqn):
        return Origin.ELEMENTWISE
    if all(value.traits.table for value in operands):
        return Origin.TABLE
    dtypes = [value.dtype for value in operands[:2]]
    rounds = any(map(exceeds_16_bits, dtypes)) and any(map(eligible, dtypes))
    return Origin.INTEGERS if rounds else None
