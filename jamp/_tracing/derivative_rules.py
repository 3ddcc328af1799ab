"""The programs of the derivative rules that an equation has, traced as written.

A rule is traced for the operands that are perturbed where JAX asks for it, and for the
cotangents that are not symbolic zeros there: it may do other things for others, or
refuse them.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jamp._compat import settings
from jamp._equations.binding import bind
from jamp._tracing.options import Options
from jamp._tracing.regions import backward_of
from jamp._tracing.trace import with_arrays
from jamp._tracing.users_casts import make_jaxpr

# Whether a backward rule may log: not in every supported release.
LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")


def differentiable(eqn: JaxprEqn) -> list[int]:
    """Operands of an equation that have tangents, as those of extended dtypes may."""
    tangents = (var.aval.to_tangent_aval() for var in eqn.invars)
    dtypes = [getattr(aval, "dtype", None) for aval in tangents]
    # NumPy takes None for float64: only `is` tells them apart.
    return [
        place
        for place, dtype in enumerate(dtypes)
        if dtype is not None and dtype != jax.dtypes.float0
    ]


def trace_jvp(
    eqn: JaxprEqn, options: Options, places: Sequence[int] | None = None
) -> Any:
    """The program of the results and tangents, for the operands that have some."""
    found = differentiable(eqn) if places is None else places
    avals = [var.aval for var in eqn.invars]

    def jvp(primals: Any, tangents: Any) -> Any:
        function = _of_operands(eqn, primals, found)
        return jax.jvp(function, [primals[place] for place in found], tangents)

    tangents = [avals[place].to_tangent_aval() for place in found]
    with settings(eqn):
        return make_jaxpr(jvp, options)(avals, tangents)


class VjpRules:
    """The programs of the two rules of an equation, each traced once.

    Both are asked for with the operands that are perturbed, and with whether the
    cotangent of each result is a symbolic zero.
    """

    def __init__(self, eqn: JaxprEqn, options: Options):
        self._eqn = eqn
        self._options = options
        self._traced = cache(self._trace)
        self._traced_backward = cache(self._trace_backward)

    def forward(self, places: tuple[int, ...]) -> Any:
        """The program of the results and residuals."""
        program, _ = self._traced(places, (False,) * len(self._eqn.outvars))
        return program

    def _trace(self, places: tuple[int, ...], zeros: tuple[bool, ...]) -> Any:
        """The program of the results and residuals, and the pullback's structure."""
        trees: list[Any] = []

        def forward(*arrays: Any) -> tuple[Any, Any]:
            function = _of_operands(self._eqn, arrays, places)

            def stopped(*taken: Any) -> list[Any]:
                pairs = zip(function(*taken), zeros, strict=True)
                return [jax.lax.stop_gradient(x) if zero else x for x, zero in pairs]

            outs, pullback = jax.vjp(stopped, *(arrays[place] for place in places))
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return outs, residuals

        avals = [var.aval for var in self._eqn.invars]
        with settings(self._eqn):
            program = make_jaxpr(forward, self._options)(*avals)
        return program, trees[-1]

    def backward(self, places: tuple[int, ...], zeros: tuple[bool, ...]) -> Any:
        """The program of the gradients, and of logs, from residuals and cotangents."""
        program, _ = self._traced_backward(places, zeros)
        return program

    def logs(
        self, places: tuple[int, ...], zeros: tuple[bool, ...], leaves: Sequence[Any]
    ) -> Any:
        """What the backward rule logs, of the results that follow the gradients."""
        _, tree = self._traced_backward(places, zeros)
        return jax.tree.unflatten(tree, leaves)

    def _trace_backward(
        self, places: tuple[int, ...], zeros: tuple[bool, ...]
    ) -> tuple[Any, Any]:
        """The program of the backward rule, and the logs' structure."""
        program, tree = self._traced(places, zeros)
        forward = self.forward(places)
        avals, count = forward.out_avals, len(zeros)
        if program.out_avals != avals:
            # The rule keeps something else for them.
            return self._traced_backward(places, (False,) * count)
        trees: list[Any] = []

        def backward(residuals: Any, cotangents: Any) -> Any:
            pullback: Any = jax.tree.unflatten(tree, residuals)
            pull = pullback.with_logs if LOGS else lambda taken: (pullback(taken), {})
            gradients, logs = pull(cotangents)
            trees.append(jax.tree.structure(logs))
            return gradients, logs

        tangents = [aval.to_tangent_aval() for aval in avals[:count]]
        rules: Any = rules_of(self._eqn) or [None]
        with settings(self._eqn), backward_of(rules[0], forward):
            traced = make_jaxpr(backward, self._options)(avals[count:], tangents)
        return traced, trees[-1]


def trace_rules(eqn: JaxprEqn, options: Options) -> tuple[Any, ...]:
    """The programs of the derivative rules of a function, for all its operands."""
    if eqn.primitive.name == "custom_jvp_call":
        return (trace_jvp(eqn, options),)
    places, rules = tuple(differentiable(eqn)), VjpRules(eqn, options)
    return rules.forward(places), rules.backward(places, (False,) * len(eqn.outvars))


def zero_results(program: Any) -> list[bool]:
    """Which results of a program are zeros that JAX put in for symbolic ones."""
    made = {var: eqn for eqn in program.eqns for var in eqn.outvars}

    def zero(atom: Any) -> bool:
        if isinstance(atom, Literal):
            return not np.any(atom.val)
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return zero(eqn.invars[0])

    return [zero(atom) for atom in program.jaxpr.outvars]


def _of_operands(
    eqn: JaxprEqn, arrays: Sequence[Any], places: Sequence[int]
) -> Callable[..., list[Any]]:
    """An equation as a function of some of its operands."""
    return lambda *taken: bind(eqn, with_arrays(arrays, places, taken))


# What jamp, and JAX where it binds an equation again, put around any rule.
_AROUND = {"_run_rule", "_handle_consts_in_bwd"}


def rules_of(eqn: JaxprEqn) -> Hashable:
    """What calls of functions with the same derivative rules have in common.

    That is the functions given to `defjvp` or `defvjp`, and the structure of what they
    take. None where it cannot be told, and for rules that take arguments which are not
    differentiated: those belong to one call.
    """
    # An equation has nothing public but functions made for it, which call the user's.
    params: Any = eqn.params
    backward = [params["bwd"]] if "bwd" in params else []
    name = ("fwd", "fwd_jaxpr_thunk") if backward else ("jvp", "jvp_jaxpr_fun")
    rules = [_rule_behind(params.get(name[1]), *name), *backward]
    made = [
        [t for t in getattr(rule, "transforms", ()) if t[0].__name__ not in _AROUND]
        for rule in rules
    ]
    if any(len(transforms) != 1 for transforms in made):
        return None
    ((_, static), *_), *_ = made
    # Of these, the last is made for each call, and what comes before it the structure.
    return (*(rule.f for rule in rules), static[-2], params["symbolic_zeros"])


def _rule_behind(thunk: Any, name: str, thunk_name: str) -> Any:
    """What a thunk makes a program of, also where equations were bound again."""
    rule = _closed_over(_closed_over(getattr(thunk, "f", None), "fn"), name)
    earlier = _closed_over(getattr(rule, "f", None), thunk_name)
    return rule if earlier is None else _rule_behind(earlier, name, thunk_name)


def _closed_over(function: Any, name: str) -> Any:
    """What a function closes over under a name; None if nothing."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
