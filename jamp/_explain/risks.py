"""Numbers that a plan rounds to 16 bits, and that may not survive it.

What is known of values is followed through the plan, in whatever dtype they are: which
are squares or exponentials and where they became it, what is a sum and what is rounded.
"""

from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jamp import _dtypes, _primitives
from jamp._equations.walks import closed
from jamp._explain.names import line_of
from jamp._plan.plan import Action, Bind, Broadcast, Float32Call, Plan, Structural
from jamp._plan.values import Value
from jamp._tracing.locations import Location, location

# What is known of a value, and where it became so.
Facts = Mapping[str, str]

_KEEPING = _primitives.EXACT | _primitives.MOVEMENT
_KNOWN = _KEEPING | _primitives.CALLS.keys()
_LINEAR = _KEEPING | _primitives.SUMS | _primitives.SCALING
_BOUNDED = frozenset("cos erf logistic sin tanh".split())
_ADVICE = {
    "square": "may leave its range: compute it and what reads it in float32",
    "exponential": "may leave its range: subtract the maximum first",
}


def find_risks(plan: Plan) -> tuple[str, ...]:
    """Sentences on what may be lost, one for each operation and line."""
    walk = _Walk()
    walk.plan(plan, ())
    return tuple(walk.found)


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._callers: tuple[JaxprEqn, ...] = ()
        # What is known of the results of programs, which several may call.
        self._results_of: dict[Hashable, list[Facts]] = {}

    def plan(self, plan: Plan, operands: Sequence[Facts]) -> list[Facts]:
        """What is known of the results of a plan, given what is of its operands."""
        inputs = [value.number for value in plan.inputs]
        known: dict[int, Facts] = dict(zip(inputs, operands, strict=False))

        def read(value: Value) -> Facts:
            literal = value.array is not None and value.traits.table
            return _constant(value.array) if literal else known.get(value.number, {})

        callers = self._callers
        for action in plan.actions:
            self._callers = (*callers, *action.lineage)
            results = self._results(action, list(map(read, action.operands)))
            for value, facts in zip(action.results, results, strict=True):
                rounds = value.low and {"sum", "square"} & facts.keys()
                known[value.number] = {**facts, "rounded": ""} if rounds else facts
        self._callers = callers
        return list(map(read, plan.results))

    def _results(self, action: Action, taken: Sequence[Facts]) -> Sequence[Facts]:
        name = getattr(getattr(action, "eqn", None), "primitive", "")
        if str(name) not in _KNOWN and not isinstance(action, Broadcast):
            self._note(action.operands, taken)
        match action:
            case Float32Call():
                known = dict(zip(action.invars, taken, strict=False))
                made = self._equations(action.eqns, known, action.outvars)
                pairs = zip(made, action.narrowed, strict=True)
                return [*made, *(facts for facts, value in pairs if value is not None)]
            case Bind():
                return self._equation(action.eqn, taken[: len(action.eqn.invars)])
            case Structural() if str(name) in _primitives.CALLS:
                return self._once(self.plan, action.plans[0], taken)
            case Structural():
                for plan in action.plans:
                    self.plan(plan, ())
                return [{}] * len(action.results)
        # A cast may be handed another, which its gradient goes to.
        return taken[: len(action.results)]

    def _note(self, values: Sequence[Value], taken: Sequence[Facts]) -> None:
        """Notes what is read in 16 bits of a narrower range than float32's."""
        for value, facts in zip(values, taken, strict=True):
            if value.low and jnp.finfo(value.dtype).maxexp < 128:
                for fact in sorted(_ADVICE.keys() & facts.keys()):
                    what = f"{facts[fact]}, rounded to {value.dtype}, {_ADVICE[fact]}"
                    self.found[what] = None

    def _once(
        self,
        walk: Callable[[Any, Sequence[Facts]], list[Facts]],
        program: Any,
        taken: Sequence[Facts],
    ) -> list[Facts]:
        known = tuple(frozenset(facts.items()) for facts in taken)
        # What a library holds is told at the line that calls it.
        key = id(program), known, next(self._places(), None)
        if key not in self._results_of:
            self._results_of[key] = walk(program, taken)
        return self._results_of[key]

    def _places(self, *eqns: JaxprEqn) -> Iterator[Location]:
        """The user's lines of equations and of what calls them, innermost first."""
        return filter(None, map(location, (*eqns, *reversed(self._callers))))

    def _program(self, jaxpr: Any, taken: Sequence[Facts]) -> list[Facts]:
        known = dict(zip(jaxpr.invars, taken, strict=True))
        return self._equations(jaxpr.eqns, known, jaxpr.outvars)

    def _equations(
        self, eqns: Iterable[JaxprEqn], known: dict[Any, Facts], outs: Iterable[Any]
    ) -> list[Facts]:
        def read(var: Any) -> Facts:
            literal = isinstance(var, Literal)
            return _constant(var.val) if literal else known.get(var, {})

        for eqn in eqns:
            made = self._equation(eqn, list(map(read, eqn.invars)))
            known.update(zip(eqn.outvars, made, strict=True))
        return list(map(read, outs))

    def _equation(self, eqn: JaxprEqn, taken: Sequence[Facts]) -> list[Facts]:
        name = eqn.primitive.name
        if name in _primitives.CALLS:
            inner = closed(eqn.params[_primitives.CALLS[name]]).jaxpr
            return self._once(self._program, inner, taken)
        at = next(map(line_of, self._places(eqn)), "unknown location")
        sums = name == "sub" and all({"sum", "square"} & f.keys() for f in taken)
        if sums and {"sum", "square", "rounded"} <= set().union(*taken):
            what = f"{name} at {at} of rounded sums: compute these in float32"
            self.found[what] = None
        return [_facts(eqn, taken, f"{name} at {at}")] * len(eqn.outvars)


def _constant(value: Any) -> Facts:
    dtype = jax.typeof(value).dtype
    if not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        return {}  # as float0
    size = np.max(np.abs(value))
    more = {"falling": np.all(np.real(value) < 0), "tiny": size < 0.1, "huge": size > 9}
    return dict.fromkeys(("constant", "bounded", *(f for f in more if more[f])), "")


def _facts(eqn: JaxprEqn, operands: Sequence[Facts], where: str) -> Facts:
    """What is known of the result of an equation."""
    name, pairs = eqn.primitive.name, zip(eqn.invars, operands, strict=True)
    # Not of indices and masks.
    taken = [f for v, f in pairs if _dtypes.eligible(_dtypes.dtype_of(v))]
    varying = [facts for facts in taken if "constant" not in facts]
    if all("constant" in facts for facts in operands):
        return operands[0] if operands else {}
    if not varying:
        return {}
    some = {fact: at for facts in varying for fact, at in facts.items()}
    common = {f: some[f] for f in some if all(f in facts for facts in varying)}
    bounded = all("bounded" in facts for facts in taken)
    sums = name in _primitives.SUMS
    if name in ("exp", "exp2"):
        safe = {"bounded", "falling"} & common.keys()
        return {"bounded": ""} if safe else {"exponential": where}
    if name == "reshape":
        return {**operands[0], "reshaped": str(id(eqn.invars[0]))}
    if _power(eqn, operands) >= 2:
        square = {"square": where, "sum": ""} if sums else {"square": where}
        return {"bounded": ""} if bounded else square
    if name in _BOUNDED:
        return {"bounded": ""}
    if name in ("clamp", "min") and len(varying) < len(taken):
        return {"falling": ""}
    if name not in _LINEAR or (name == "div" and "constant" not in operands[1]):
        return {}
    lost = {"bounded", "falling", "reshaped", *(["rounded"] if sums else [])}
    # Who scales it down makes it fit; but who divides a sum takes a mean.
    if (name == "mul" and any("tiny" in facts for facts in taken)) or (
        name == "div" and "huge" in taken[1] and "sum" not in common
    ):
        lost |= _ADVICE.keys()
    kept = some if name in _primitives.PRODUCTS else common
    found = {fact: at for fact, at in kept.items() if fact not in lost}
    product = name in ("div", "mul") and any("falling" in facts for facts in taken)
    falls = product or name in ("neg", "sub") or "falling" in common
    more = {"falling": falls, "sum": sums, "bounded": bounded}
    return {**found, **{fact: "" for fact, holds in more.items() if holds}}


def _power(eqn: JaxprEqn, operands: Sequence[Facts]) -> float:
    """Of what it takes, if it is a power of that alone."""
    name, (x, *others) = eqn.primitive.name, eqn.invars
    if name == "pow" and isinstance(others[0], Literal):
        return float(others[0].val)
    if name in _primitives.PRODUCTS | {"mul"}:
        sources = [facts.get("reshaped") for facts in operands[:2]]
        same = sources[0] is not None and sources[0] == sources[1]
        return 2 if same or x is others[0] else 1
    return 2 if name == "square" else eqn.params.get("y") or 1
