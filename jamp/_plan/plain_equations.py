"""Equations without inner programs: cast the operands, bind, round."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._dtypes import FLOAT32, DType
from jamp._equations.walks import holds_program
from jamp._lowerings.hook import has_own_primitive, has_own_product
from jamp._plan.biases import bias_dims, dims_after, keep_float32, product_and_bias
from jamp._plan.dtypes import Dtypes, choose, result_dtypes
from jamp._plan.equation import Equation
from jamp._plan.plan import Bind, Broadcast
from jamp._plan.products import adds_nothing, explicit_precision
from jamp._plan.records import Note, Origin, Ruling
from jamp._plan.sums import carried_sums, made_of
from jamp._plan.values import (
    BOOLEAN,
    Traits,
    Value,
    Values,
    held,
    propagate,
    scale_of,
)
from jamp._policy.policy import Policy
from jamp._policy.rules import Rule
from jamp._tracing.users_casts import is_explicit, is_kept_cast


def plan_plain(equation: Equation) -> list[Value]:
    eqn, operands, caster = equation.eqn, equation.operands, equation.caster
    context = equation.context
    rule = caster.record.ruling.rule
    bound = None if rule is Rule.AS_TRACED else _bound_to_dtypes(eqn)
    if bound:
        return plan_as_traced(equation, bound)
    biased = _plan_biased_product(equation) if eqn.primitive.name == "add" else None
    if biased is not None:
        return biased
    dtypes = choose(rule, eqn, operands, context.region.dtype)
    pairs = zip(operands, dtypes.operands, strict=True)
    if dtypes.why and any(v.low and dtype == FLOAT32 for v, dtype in pairs):
        caster.record.note = Note(dtypes.why)
    return cast_and_bind(equation, dtypes)


def _plan_biased_product(equation: Equation) -> list[Value] | None:
    """Plans a sum of a product and its bias that is rounded once; None for others."""
    operands, caster = equation.operands, equation.caster
    promotes = caster.record.ruling.rule is Rule.PROMOTE
    castable = all(value.eligible for value in operands)
    if not (promotes and castable and caster.options.device_type == "cpu"):
        return None
    product = product_and_bias(*operands)
    if product is None:
        return None
    wide = keep_float32(product, caster.plan)
    if wide is None:
        return None
    taken = [wide if value is product else value for value in operands]
    floating = Dtypes((FLOAT32, FLOAT32))
    (result,) = cast_and_bind(equation._replace(operands=taken), floating)
    return [caster.cast(result, product.dtype)]


def plan_as_traced(equation: Equation, why: Origin = Origin.OPAQUE) -> list[Value]:
    """Plans an equation in the dtypes it was traced in, whatever its rule."""
    name = equation.eqn.primitive.name
    equation.caster.record.ruling = Ruling(Rule.AS_TRACED, why, name)
    return plan_plain(equation)


def _bound_to_dtypes(eqn: JaxprEqn) -> Origin | None:
    """Why an equation can only run as traced, whatever its rule, if it can."""
    name = eqn.primitive.name
    if name in _primitives.PRODUCTS:
        return Origin.PRECISION if explicit_precision(eqn) else None
    opaque = holds_program(eqn) and name not in _primitives.SCATTERS
    opaque |= name == "bitcast_convert_type"
    return Origin.OPAQUE if opaque else None


def cast_and_bind(equation: Equation, dtypes: Dtypes) -> list[Value]:
    """Plans an equation in some dtypes; returns what readers see of its results."""
    eqn, operands, caster = equation.eqn, equation.operands, equation.caster
    plan = caster.plan
    cast = [
        value if dtype is None else _operand(equation, value, dtype)
        for value, dtype in zip(operands, dtypes.operands, strict=True)
    ]
    caster.record.operands = used = tuple([value.dtype for value in cast])
    traced = tuple(map(_dtypes.dtype_of, eqn.invars))
    table = _is_table(eqn, operands, caster.options.policy)
    known = [
        _result_traits(equation, taken, used)._replace(
            table=table, sum_dtype=None, origins=frozenset()
        )
        for taken in made_of(eqn, operands)
    ]
    made = zip(eqn.outvars, result_dtypes(eqn, used, traced), known, strict=True)
    results = [Value.of(var.aval, dtype, traits) for var, dtype, traits in made]
    numbers = {value.number for value in cast if value.eligible}
    if (
        eqn.primitive.name in _primitives.ARRANGING
        and numbers <= plan.rearranged_inputs
    ):
        plan.rearranged_inputs.update(value.number for value in results)
    ruled = caster.record.ruling.rule is not Rule.AS_TRACED
    given = [value.dtype for value in operands]
    changed = used != traced or (ruled and has_own_primitive(eqn, used, given))
    plan.changed |= changed
    weights = _weights(equation, used) if changed else {}
    taken, lowered = [*cast, *weights.values()], used if changed else None
    action = Bind(taken, results, caster, eqn, lowered, operands, tuple(weights))
    plan.append(action)
    targets = dtypes.results or (None,) * len(results)
    seen = [
        caster.cast(value, dtype, rounds=True) if dtype and value.eligible else value
        for value, dtype in zip(results, targets, strict=True)
    ]
    if not dtypes.results:
        return seen
    carried = carried_sums(eqn, operands)
    return [
        wide.seen(narrow, found.origins) if found and found.dtype == to else narrow
        for wide, narrow, found, to in zip(results, seen, carried, targets, strict=True)
    ]


def _weights(equation: Equation, used: Sequence[Any]) -> dict[int, Value]:
    """The weights that operands of a product are casts of, by place.

    It gives the gradients of these in float32, without rounding them to 16 bits first.
    """
    wanted = equation.caster.options.policy.float32_gradients
    if not (wanted and has_own_product(equation.eqn.primitive.name, used)):
        return {}
    given = equation.plan.rearranged_inputs
    sources = {p: v.cast_from or v for p, v in enumerate(equation.operands)}
    return {
        place: value
        for place, value in sources.items()
        if value.dtype == FLOAT32
        and value.number in given
        and not value.traits.activation
    }


def _operand(equation: Equation, value: Value, dtype: DType) -> Value:
    """An operand in a dtype.

    The gradient of what an equation broadcasts is a sum: it is broadcast in float32, so
    that the sum is taken in float32 too, and rounded afterwards.
    """
    eqn, caster = equation.eqn, equation.caster
    if (
        eqn.primitive.name not in _primitives.BROADCASTING
        or dtype not in _dtypes.LOW_DTYPES
        or value.aval.shape == _dtypes.shape_of(eqn.outvars[0])
        or value.follows
    ):
        return caster.cast(value, dtype)
    spread = Value.of(eqn.outvars[0].aval, FLOAT32)
    caster.plan.changed = True
    wide = caster.cast(value, FLOAT32)
    caster.plan.append(Broadcast((wide,), (spread,), caster))
    return caster.cast(spread, dtype)


def _result_traits(equation: Equation, operands: Values, used: Sequence[Any]) -> Traits:
    """What is known of a result that is made of some operands."""
    eqn, context, caster = equation.eqn, equation.context, equation.caster
    name = eqn.primitive.name
    floats = [v for v in operands if v.eligible]
    rules = caster.options.policy.function_rules
    in_listed = any(rules.get(found) is Rule.LOWER for found in context.functions)
    # A scalar among arrays scales them.
    activation = any(v.traits.activation for v in operands if v.rank > 0)
    constants = None
    if caster.record.ruling.rule is Rule.PROMOTE:
        constants = propagate(eqn, [v.traits.constants for v in operands])
    if name in _primitives.PRODUCTS:
        low = all(d in _dtypes.LOW_DTYPES for d in used[:2])
        if not low or adds_nothing(eqn):
            return Traits(activation=activation)
        dims = bias_dims(eqn, operands, caster.plan.inputs, in_listed=in_listed)
        return Traits(bias_dims=dims, activation=True)
    unsafe = caster.options.policy.unsafe
    if name in _primitives.PROBABILITIES or any(name in u.of for u in unsafe):
        return Traits(activation=activation, probability=frozenset([name]))
    if name in _primitives.MOVEMENT and floats:
        source = floats[0].traits
        return source._replace(
            constants=constants,
            repeated=dims_after(eqn, source.repeated, new=True),
            bias_dims=tuple(
                [dims_after(eqn, dims, new=False) for dims in source.bias_dims]
            ),
        )
    traits = Traits(constants, activation=activation, scale=scale_of(eqn, operands))
    if name == "split" or (in_listed and name == "add"):
        # As of a cell, whose biases are added to gates, or to the sum of two products.
        first, *others = (v.traits.bias_dims for v in operands)
        dims = tuple([d for d in first if all(d in other for other in others)])
        traits = traits._replace(bias_dims=dims)
    if name in _primitives.KEEPING_PROBABILITY:
        firm = [v.traits for v in floats if not v.follows]
        found = [known for known in firm if known.probability]
        if found and (len(firm) == 1 or name not in _primitives.BROADCASTING):
            names = frozenset().union(*(known.probability for known in found))
            return traits._replace(probability=names, rounded_to=found[0].rounded_to)
    return traits


def _is_table(eqn: JaxprEqn, operands: Values, policy: Policy) -> bool:
    """Whether an equation makes something of iota and literals alone.

    What gives random bits, calls back or is unknown runs as traced, and gives data.
    """
    name = eqn.primitive.name
    rule = policy.primitive_rules.get(name, Rule.AS_TRACED)
    if rule is Rule.AS_TRACED and name not in _primitives.LOGICAL | {"iota"}:
        return False
    return all(value.traits.table for value in operands)


def rounds_nothing(eqn: JaxprEqn, dtype: Any = FLOAT32) -> bool:
    """Whether an equation rounds numbers of a dtype to no fewer bits than it has."""
    if eqn.primitive.name != "reduce_precision":
        return False
    bits, params = jnp.finfo(dtype), eqn.params
    exponent, mantissa = params["exponent_bits"], params["mantissa_bits"]
    return bool(exponent >= bits.nexp and mantissa >= bits.nmant)


def plan_rounding(equation: Equation) -> list[Value]:
    """Plans a rounding; one that rounds nothing is left out, of 16 bits or constants.

    JAX has these of all that a checkpoint saves; as traced, it would save float32.
    """
    (value,), record = equation.operands, equation.caster.record
    left_out = value.low or value.follows
    if record.ruling.origin is not Origin.IDENTITY or not left_out:
        return plan_plain(equation)
    record.operands = (value.dtype,)
    equation.plan.changed = True
    return [value]


def plan_convert(equation: Equation) -> list[Value]:
    """Plans a cast of the traced program.

    A cast that the user asked for is made. One that promotion inserted to widen an
    operand is not: operands are promoted by the dtypes that they have by now.
    """
    eqn, (value,), caster = equation.eqn, equation.operands, equation.caster
    if is_kept_cast(eqn):
        caster.plan.changed = True
        caster.record.operands = (value.dtype,)
        return [caster.cast(value, FLOAT32)]
    new_dtype = eqn.params["new_dtype"]
    rule = caster.record.ruling.rule
    if rule is Rule.AS_TRACED or not _dtypes.eligible(new_dtype):
        return plan_plain(equation)
    target = np.dtype(new_dtype)
    if not value.eligible:
        (result,) = cast_and_bind(equation, Dtypes((None,)))
        known = BOOLEAN if value.dtype == np.bool_ else value.traits.constants
        return [result.knowing(constants=known)]
    caster.record.operands = (value.dtype,)
    if rule is Rule.FLOAT32:
        return [caster.cast(value, FLOAT32)]
    traced = _dtypes.dtype_of(eqn.invars[0])
    promoted = traced.itemsize < target.itemsize and not is_explicit(eqn)
    # Gradients of weakly typed values are made weakly typed.
    if promoted or (traced == target and eqn.params["weak_type"]):
        caster.plan.changed = True
        return [value]
    # A constant is as weak as its reader needs it.
    if value.dtype == traced and (traced != target or not value.follows):
        (result,) = cast_and_bind(equation, Dtypes((None,)))
        known = value.traits.constants and held(value.traits.constants, target)
        return [result.knowing(constants=known)]
    return [caster.cast(value, target)]
