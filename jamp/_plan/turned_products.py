"""Products that only a transpose reads: their operands change places instead.

JAX's gradients of weights come with such transposes, if they are taken inside autocast.
On CPUs XLA writes the product as it stands, and what reads the transpose reads it
across. On GPUs it chooses the layout of the product, which costs nothing.
"""

from collections import Counter
from dataclasses import replace

from jax.extend.core import JaxprEqn

from jamp._dtypes import shape_of
from jamp._plan.plan import Action, Bind, Plan
from jamp._plan.values import Values


def turned_products(plan: Plan) -> Plan:
    """The same plan without transposes that only change the order of two operands."""
    counts = Counter(value.number for value in plan.results)
    for action in plan.actions:
        # What a step reads may be handed to it in another dtype.
        known = action.read if isinstance(action, Bind) else ()
        counts.update({value.number for value in (*action.operands, *known)})
    transposes = {
        action.operands[0].number: action
        for action in plan.actions
        if isinstance(action, Bind) and action.name == "transpose"
    }
    turned = {
        action: (transpose, _turned(action, transpose.results))
        for action in plan.actions
        if isinstance(action, Bind)
        and _may_turn(action)
        and counts[action.results[0].number] == 1
        and (transpose := transposes.get(action.results[0].number))
        and transpose.eqn.params["permutation"] == _order_of_turned(action.eqn)
    }
    if not turned:
        return plan
    spared = {transpose for transpose, _ in turned.values()}
    actions: list[Action] = [
        turned[action][1] if action in turned else action
        for action in plan.actions
        if action not in spared
    ]
    return replace(plan, actions=actions)


def _may_turn(action: Bind) -> bool:
    """Whether it is a product on CPUs, in other dtypes than traced."""
    if action.device_type != "cpu" or action.name != "dot_general":
        return False
    spread = action.eqn.params["out_sharding"] is not None
    return action.operand_dtypes is not None and not spread


def _order_of_turned(eqn: JaxprEqn) -> tuple[int, ...]:
    """In which order the dimensions of a product stand if its operands are turned."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, count = (len(shape_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    first, second = len(batch), left - len(contracted)
    return (*range(first), *range(second, count), *range(first, second))


def _turned(action: Bind, results: Values) -> Bind:
    """A product with its operands turned, for the results of its transpose."""
    eqn = action.eqn
    contracted, batch = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    params = {
        "dimension_numbers": (contracted[::-1], batch[::-1]),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    weights = dict(zip(action.weights, action.operands[2:], strict=True))
    places = sorted(1 - place for place in weights)
    return replace(
        action,
        eqn=eqn.replace(invars=eqn.invars[::-1], params={**eqn.params, **params}),
        operands=[*action.operands[1::-1], *(weights[1 - place] for place in places)],
        operand_dtypes=action.operand_dtypes and action.operand_dtypes[::-1],
        read=action.read[::-1],
        weights=tuple(places),
        results=results,
    )
