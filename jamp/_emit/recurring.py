"""Programs that were emitted before, in calls that run op by op.

JAX compiles a jitted function, or a loop, once for each program that it is handed, and
calls that run op by op, as in an eager `jax.grad`, emit theirs anew. So that nothing is
compiled at every call, an equal program that was made of the same one takes its place.
It is kept as long as JAX keeps the one that it was made of: as long as the function.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from jamp._compat import becomes_a_program, is_plain_array
from jamp._equations.binding import looks_for_nans
from jamp._equations.content import content_of, is_key
from jamp._equations.walks import nested
from jamp._plan.plan import Structural
from jamp._primitives import CALLS
from jamp._tracing.cache_key import Programs
from jamp._tracing.derivative_rules import rules_of
from jamp._tracing.locations import calls_users

# What JAX compiles where it is bound, and not what it is made of.
_COMPILED = frozenset({"cond", "jit", "remat2", "scan", "while"})
# How many are kept of one program, such as one for each policy.
_MOST_PROGRAMS = 8
_emitted: WeakKeyDictionary[Any, Programs] = WeakKeyDictionary()
# The attribute of a rule made for one call: what it has in common with equal ones.
MADE_OF = "made_of"


def recurs(action: Structural) -> bool:
    """Whether an action is one that JAX would compile now, as it did for equal ones."""
    eqn = action.eqn
    if action.kind not in _COMPILED or eqn.effects or becomes_a_program():
        return False
    plain = all(is_plain_array(value.aval) for value in action.operands)
    return plain and not looks_for_nans() and not _traces_rules_anew(action)


def _traces_rules_anew(action: Structural) -> bool:
    """Whether JAX asks rules of the user's anew, which may read what has changed."""
    return action.kind not in ("jit", "remat2") and any(
        eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p) and calls_users(eqn)
        for eqn in nested([action.eqn])
    )


def run_as_before(
    eqn: JaxprEqn, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]
) -> Sequence[Any]:
    """Binds what an equation becomes, by an earlier program if there is an equal one.

    Args:
      eqn: the equation as traced, which holds a program.
      run: binds what it becomes, given what this takes.
      arrays: what it takes.
    """
    program = jax.make_jaxpr(run)(*map(jax.typeof, arrays))
    source, *_ = jaxprs_in_params(eqn.params)
    results: Sequence[Any] = jaxpr_as_fun(_known(source, program))(*arrays)
    return results


def _known(source: Any, program: Any) -> Any:
    """An equal program that was made of the same one before; else this one."""
    # The constants are held by the program that is kept, so that their ids stay taken.
    key = content_of(program, custom=_rules, constant=id)
    if not is_key(key):
        return program
    programs = _emitted.setdefault(source, Programs(_MOST_PROGRAMS))
    found = programs.get(key)
    if found is None:
        programs.put(key, program)
        found = program
    return found


def _rules(eqn: JaxprEqn) -> Hashable:
    """What calls of a function with derivative rules have in common."""
    rules: Any = rules_of(eqn)
    if rules is None:
        return None
    program = eqn.params[CALLS[eqn.primitive.name]]
    called = content_of(program, custom=_rules, constant=id)
    return called and (called, tuple([getattr(rule, MADE_OF, rule) for rule in rules]))
