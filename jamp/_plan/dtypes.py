"""In which dtypes an equation computes under a rule, and which its results have."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jamp import _dtypes, _primitives
from jamp._compat import settings
from jamp._dtypes import FLOAT32, DType
from jamp._plan.biases import product_and_bias
from jamp._plan.sums import adds_up, reduces_fully
from jamp._plan.values import Value, Values, destroyed, inexact, overscaled
from jamp._policy.rules import Rule

# Of scores from which so much is taken a softmax makes nothing.
_HIDING = 64.0

# Why what came in 16 bits is computed on in float32, in reports.
_BESIDE = "beside float32"
_BESIDE_TABLE = "beside constants"
_BY_NUMBER = "float32 number"
_BY_CONSTANT = "inexact constant"
_OUT_OF_RANGE = "constant out of range"
_OVERSCALED = "constants out of range"
_TO_ONE = "to one number"
_ADDED_UP = "adds up"
_GRADIENT_ADDS_UP = "gradient adds up"


class Dtypes(NamedTuple):
    operands: tuple[DType | None, ...]  # None leaves one as it is
    results: tuple[DType | None, ...] = ()  # those to which they are rounded, if any
    why: str = ""  # why, if 16 bits are promoted to float32


def choose(rule: Rule, eqn: JaxprEqn, operands: Values, low: DType) -> Dtypes:
    """The dtypes in which an equation computes under a rule, and those it rounds to."""
    if rule is Rule.LOWER and any(_dtypes.is_complex(v.dtype) for v in operands):
        rule = Rule.AS_TRACED
    if rule is Rule.AS_TRACED or any(_dtypes.is_double(v.dtype) for v in operands):
        pairs = zip(eqn.invars, operands, strict=True)
        return Dtypes(
            tuple([_dtypes.dtype_of(v) if x.eligible else None for v, x in pairs])
        )
    given = low if rule is Rule.LOWER else _activation(operands)
    # There is no 16-bit kernel: only the result is as the rule has it.
    if eqn.primitive.name in _primitives.FLOAT32_ONLY and rule is not Rule.FLOAT32:
        rule = Rule.INTERNAL_FLOAT32
    if rule in (Rule.PROMOTE, Rule.INTERNAL_FLOAT32) and reduces_fully(eqn, operands):
        return Dtypes(_each(operands, FLOAT32), (), _TO_ONE)
    if rule is Rule.PROMOTE:
        found = _promote(eqn, operands)
        return _summed(eqn, operands, found) if adds_up(eqn, operands) else found
    dtype = low if rule is Rule.LOWER else FLOAT32
    if any(destroyed(value, dtype) for value in operands):
        dtype = FLOAT32
    rounds = rule is Rule.INTERNAL_FLOAT32
    results = (given,) * len(eqn.outvars) if rounds else ()
    return Dtypes(_each(operands, dtype), results)


def _summed(eqn: JaxprEqn, operands: Values, promoted: Dtypes) -> Dtypes:
    """What is promoted and adds up, in float32, so that the sum is rounded once."""
    floating = _each(operands, FLOAT32)
    if eqn.primitive.name in _primitives.EACH_BY_ITSELF:
        floating = tuple([FLOAT32 if v.traits.sum_dtype else None for v in operands])
    used = [dtype for dtype in promoted.operands if dtype is not None]
    rounded = promoted.results
    if used and not rounded:
        rounded = (_dtypes.widest(used),) * len(eqn.outvars)
    # Others have the dtypes of their operands, and indices beside them.
    own = [value.dtype for value in operands] + [None] * len(eqn.outvars)
    repeats = eqn.primitive.name in _primitives.REPEATING | _primitives.POOLS
    why = _GRADIENT_ADDS_UP if repeats else _ADDED_UP
    return Dtypes(floating, rounded or tuple(own[: len(eqn.outvars)]), why)


def _each(operands: Values, dtype: DType) -> tuple[DType | None, ...]:
    """A dtype for each operand that may be cast."""
    return tuple([dtype if value.eligible else None for value in operands])


def _activation(operands: Values) -> DType | None:
    """The widest dtype among the operands of the highest rank."""
    floats = [v for v in operands if v.eligible and not v.follows]
    if not floats:
        return None
    rank = max(v.ndim for v in floats)
    return _dtypes.widest(v.dtype for v in floats if v.ndim == rank)


def _promote(eqn: JaxprEqn, operands: Values) -> Dtypes:
    """The widest dtype of the operands; scalars and most constants follow others."""
    floats = [v for v in operands if v.eligible]
    firm = [v for v in floats if not v.follows or _shifts(v, eqn)]
    if eqn.primitive.name in _primitives.INDEPENDENT or not floats:
        return Dtypes((None,) * len(operands))
    arrays = [v for v in firm if v.rank > 0] or firm
    if not arrays:
        dtype = _dtypes.widest(v.dtype for v in floats)
        return Dtypes(_each(operands, dtype))
    product = product_and_bias(*floats) if eqn.primitive.name == "add" else None
    dtype = product.dtype if product else _dtypes.widest(v.dtype for v in arrays)
    if any(destroyed(value, dtype) for value in floats):
        return Dtypes(_each(operands, FLOAT32), (), _OUT_OF_RANGE)
    if dtype == FLOAT32:
        why = _BESIDE_TABLE if all(v.low or v.follows for v in arrays) else _BESIDE
        return Dtypes(_each(operands, dtype), (), why)
    why = _rounded_once(eqn, floats, dtype)
    if why:
        return Dtypes(_each(operands, FLOAT32), (dtype,) * len(eqn.outvars), why)
    return Dtypes(_each(operands, dtype))


def _rounded_once(eqn: JaxprEqn, floats: Values, low: DType) -> str:
    """Why an equation on 16 bits is computed in float32 and then rounded, if so."""
    if any(_is_computed_number(value) for value in floats):
        return _BY_NUMBER
    if any(_is_wide_constant(value, eqn, low) for value in floats):
        return _BY_CONSTANT
    return _OVERSCALED if overscaled(eqn, floats, low) else ""


def _shifts(value: Value, eqn: JaxprEqn) -> bool:
    """Whether a table of constants is added to some numbers more than to others.

    As a multiple of the identity it is no more than their rounding, and promotes. What
    a mask adds hides them: beside it they are nothing.
    """
    if eqn.primitive.name not in _primitives.SHIFTING or not value.traits.table:
        return False
    numbers = value.traits.constants or frozenset()
    return len(numbers) > 1 and all(abs(number) < _HIDING for number in numbers)


def _is_computed_number(value: Value) -> bool:
    """Whether it is one float32 number, not known before the program runs.

    It may be out of range, and its gradient is a sum.
    """
    return not value.follows and value.rank == 0 and value.dtype == FLOAT32


def _is_wide_constant(value: Value, eqn: JaxprEqn, low: DType) -> bool:
    """Whether an equation takes a constant in float32, and rounds its result.

    It would be rounded before the result is, and all that it scales with it. What masks
    add is mostly so large that its rounding is nothing.
    """
    name = eqn.primitive.name
    if not value.follows or (name in _primitives.SHIFTING and value.constant is None):
        return False
    return name in _primitives.ROUNDING and inexact(value, low)


def result_dtypes(
    eqn: JaxprEqn, used: Sequence[Any], traced: Sequence[Any]
) -> list[Any]:
    """The dtypes of an equation's results, for operands in others than traced."""
    outs = [_dtypes.dtype_of(var) for var in eqn.outvars]
    name = eqn.primitive.name
    if used == traced:
        return outs
    if name in _primitives.PRODUCTS:
        return [_dtypes.widest(used[:2])]
    if name in _primitives.COMPARISONS:
        return outs
    if name in _primitives.OF_ONE_DTYPE and _dtypes.eligible(used[-1]):
        return [used[-1]]
    if name in _primitives.SCATTERS | _primitives.COLLECTIVES:
        # They can't be evaluated in other dtypes, or without the names of their axes.
        return list(used[: len(outs)])
    avals = _dtypes.all_in_dtypes(eqn.invars, used)
    with settings(eqn):
        found, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    results = found if eqn.primitive.multiple_results else [found]
    return [getattr(aval, "dtype", None) for aval in results]
