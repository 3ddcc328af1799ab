"""The loop over equations: cast operands, bind, record.

Inner programs are left to `jamp._rules`; here stand the order of precedence, the
occurrences of listed functions, and the emission of one equation.
"""

from __future__ import annotations

import copy
import sys
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jamp import _origin
from jamp._compat import is_plain_array
from jamp._emit import Emitter, Scribe, source_of
from jamp._errors import BannedOpError, JampWarning
from jamp._functions import Function
from jamp._occurrence import run_occurrence
from jamp._policy import Policy
from jamp._records import Origin, Record, Ruling
from jamp._regions import Options, Scope
from jamp._rule import RECIPROCAL, Rule
from jamp._rules import STRUCTURAL, handler
from jamp._rules.plain import run_as_traced
from jamp._rules.site import Site
from jamp._values import Value


class Context(NamedTuple):
    """What holds around the equations being run.

    Attributes:
      scope: named scopes and the region.
      forced: the ruling of the listed function they stand in, if it settles them.
      inside: listed functions whose own entries no longer count.
      linear: whether it is the program of a derivative, which JAX may transpose.
    """

    scope: Scope
    forced: Ruling | None = None
    inside: frozenset[Function] = frozenset()
    linear: bool = False

    @property
    def region(self) -> Options:
        """The options in force."""
        region = self.scope.region
        assert region is not None  # noqa: S101 - the root scope always has one
        return region


class Step(NamedTuple):
    """An equation with its context, the user's ruling and the call it belongs to."""

    eqn: JaxprEqn
    scope: Scope
    user: Ruling | None = None
    call: _origin.Call | None = None
    frames: _origin.FrameKey | None = None


@lru_cache(maxsize=256)
def functions(policy: Policy, modules: int) -> Mapping[int, Function]:
    """A policy's functions by the id of their code object.

    Args:
      policy: the policy.
      modules: how many modules are imported: with more, more names can be resolved.
    """
    del modules
    return {id(code): function for code, function in policy.function_codes.items()}


class Interpreter:
    """Runs programs under a policy; one per rewritten program.

    Args:
      trial: whether it only finds out what would change.
    """

    def __init__(self, trial: bool = False) -> None:
        self.trial = trial
        self.cache: dict[Any, tuple[Any, Any]] = {}
        self._warned = False
        self._callers: list[JaxprEqn] = []

    def run(
        self,
        program: Any,
        arguments: Sequence[Value],
        context: Context,
        scribe: Scribe,
    ) -> list[Value]:
        """Runs a closed jaxpr.

        Args:
          program: the closed jaxpr as traced.
          arguments: its inputs, in whatever dtypes they have by now.
          context: what holds around it.
          scribe: takes the records.

        Returns:
          Its results, in the dtypes they were computed in.
        """
        jaxpr = program.jaxpr
        env = Environment(jaxpr)
        env.bind(jaxpr.constvars, [Value.of(const) for const in program.consts])
        env.bind(jaxpr.invars, arguments)
        self.run_equations(jaxpr.eqns, 0, env, context, scribe)
        return [env.read(var) for var in jaxpr.outvars]

    def run_equations(
        self,
        eqns: Sequence[JaxprEqn],
        start: int,
        env: Environment,
        context: Context,
        scribe: Scribe,
    ) -> None:
        """Runs equations, the first of which is number `start` of its program."""
        for steps in self._occurrences(eqns, context):
            eqn, scope, user, call, _ = steps[0]
            if call is not None:
                group = [step.eqn for step in steps]
                run_occurrence(
                    self, call.function, group, start, env, context, scope, scribe
                )
            else:
                inner = context._replace(scope=scope)
                self.run_equation(eqn, env, inner, scribe, user)
            start += len(steps)

    def _occurrences(
        self, eqns: Sequence[JaxprEqn], context: Context
    ) -> Iterator[list[Step]]:
        """Groups equations by the call of a listed function that they stand in."""
        group: list[Step] = []
        for eqn in eqns:
            step = self._step(eqn, context)
            if group and not _continues(group, step):
                yield group
                group = []
            group.append(step)
            if step.call is None:
                yield group
                group = []
        if group:
            yield group

    def _step(self, eqn: JaxprEqn, context: Context) -> Step:
        scope = context.scope.enter(eqn.source_info.name_stack)
        user = user_ruling(scope)
        if user is not None or context.forced is not None:
            return Step(eqn, scope, user)
        frames = _origin.frame_key(eqn)
        if frames is None:
            self._warn_no_traceback()
            return Step(eqn, scope)
        region = scope.region
        assert region is not None  # noqa: S101 - see Context.region
        for call in _origin.calls(frames, functions(region.policy, len(sys.modules))):
            if call.function not in context.inside:
                return Step(eqn, scope, None, call, frames)
        return Step(eqn, scope)

    def _warn_no_traceback(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the program was traced without tracebacks, so that functions such "
                "as softmax cannot be recognised in it and only the rules of "
                "primitives hold; hand jamp the function, not a jaxpr made elsewhere",
                JampWarning,
                stacklevel=2,
            )

    def run_equation(
        self,
        eqn: JaxprEqn,
        env: Environment,
        context: Context,
        scribe: Scribe,
        user: Ruling | None = None,
    ) -> None:
        """Runs one equation under the rule that holds for it: the user's, if any."""
        operands = [env.read(var) for var in eqn.invars]
        ruling = context.forced if user is None else user
        if ruling is None:
            policy = context.region.policy
            self._check_unsafe(eqn, operands, policy)
            ruling = primitive_ruling(eqn, operands, policy)
        if ruling.rule is Rule.BANNED:
            raise self._banned(eqn, ruling)
        record = Record(eqn, ruling, context.scope.names)
        scribe.entries.append(record)
        emitter = Emitter(record, context.region, scribe)
        run = handler(eqn.primitive.name)
        if eqn.primitive.name in STRUCTURAL:
            if not all(is_plain_array(v.aval) for v in operands):
                # It takes a reference, or another thing that cannot be traced anew.
                run = run_as_traced
            elif user is None and ruling.rule is not Rule.PROMOTE:
                # What the user set holds inside by the scope, where a region that
                # enables autocast again ends it.
                context = context._replace(forced=ruling)
        self._callers.append(eqn)
        with source_of(eqn):
            results = run(Site(self, eqn, operands, context, emitter))
        self._callers.pop()
        record.results = tuple([v.dtype for v in results])
        env.bind(eqn.outvars, results)

    def _where(self, eqn: JaxprEqn) -> str:
        """The user's line that led to an equation, or to the call it is inside."""
        for outer in (eqn, *reversed(self._callers)):
            found = _origin.location(outer)
            if found is not None:
                return str(found)
        return "unknown location"

    def _check_unsafe(
        self, eqn: JaxprEqn, operands: Sequence[Value], policy: Policy
    ) -> None:
        for unsafe in policy.unsafe:
            if eqn.primitive.name in unsafe.primitives and any(
                operand.traits.rounded == unsafe.dtype for operand in operands
            ):
                raise BannedOpError(
                    f"{self._where(eqn)}: {eqn.primitive.name} of a probability that "
                    f"was rounded to {unsafe.dtype.name} is unsafe: {unsafe.advice}"
                )

    def _banned(self, eqn: JaxprEqn, ruling: Ruling) -> BannedOpError:
        what = ruling.function.name if ruling.function else eqn.primitive.name
        return BannedOpError(
            f"{self._where(eqn)}: {what} is banned ({ruling.source}); compute it in a "
            "region with jamp.autocast(enabled=False), or write it in a way that the "
            "policy allows"
        )


class Environment:
    """Values of a program's variables."""

    def __init__(self, jaxpr: Any) -> None:
        self._values: dict[Var, Value] = {}
        self._overlay: Mapping[Var, Value] = {}
        self._eqns: Sequence[JaxprEqn] = jaxpr.eqns
        self._readers: dict[Var, list[int]] = {}
        read = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
        for index, variables in enumerate(read):
            for var in variables:
                if not isinstance(var, Literal):
                    self._readers.setdefault(var, []).append(index)

    def read(self, var: Any) -> Value:
        """The value of a variable or literal."""
        if isinstance(var, Literal):
            return Value.literal(var)
        return self._overlay.get(var) or self._values[var]

    def overlay(self, values: Mapping[Var, Value]) -> Environment:
        """A view in which some variables read otherwise; it binds into this one."""
        view = copy.copy(self)
        view._overlay = {**self._overlay, **values}
        return view

    def bind(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Gives values to variables."""
        for var, value in zip(variables, values, strict=True):
            self._values[var] = value

    def used_from(self, var: Any, index: int) -> bool:
        """Whether equation `index` or a later one, or the caller, reads a variable."""
        return self._readers.get(var, [-1])[-1] >= index

    def next_reader(self, var: Any, index: int) -> JaxprEqn | None:
        """The first equation from number `index` on that reads a variable, if any."""
        readers = self._readers.get(var, [])
        place = bisect_left(readers, index)
        found = readers[place] if place < len(readers) else len(self._eqns)
        return self._eqns[found] if found < len(self._eqns) else None


def user_ruling(scope: Scope) -> Ruling | None:
    """The rule that a region or scope of the user's sets, which beats all others."""
    region = scope.region
    assert region is not None  # noqa: S101 - see Context.region
    if not region.enabled:
        return Ruling(Rule.AS_TRACED, Origin.REGION)
    if region.policy.scopes:
        found = region.policy.scope_rule(scope.names)
        if found is not None:
            pattern, rule = found
            return Ruling(rule, Origin.SCOPE, pattern, region.policy.name)
    return None


def primitive_ruling(
    eqn: JaxprEqn, operands: Sequence[Value], policy: Policy
) -> Ruling:
    """The rule of an equation's primitive."""
    name = eqn.primitive.name
    rules = policy.primitive_rules
    if name == "div" and operands[0].weak and not operands[1].weak:
        name = RECIPROCAL if RECIPROCAL in rules else name
    rule = rules.get(name)
    if rule is None:
        return Ruling(Rule.AS_TRACED, Origin.DEFAULT, name, policy.name)
    return Ruling(rule, Origin.PRIMITIVE, name, policy.name)


def _continues(group: Sequence[Step], step: Step) -> bool:
    """Whether an equation belongs to the call that a group of equations stands in."""
    first = group[0]
    if step.call is None or first.call is None or step.call.key != first.call.key:
        return False
    if step.scope is not first.scope and step.scope != first.scope:
        return False
    # Back at the first instruction: the call was made anew, as in a Python loop. What a
    # jitted function inlines has one and the same frames throughout.
    return step.frames != first.frames or group[-1].frames == first.frames
