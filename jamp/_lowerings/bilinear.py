"""What the products of jamp's own, of matrices and of convolutions, have in common.

Each takes operands of any floating dtypes and brings them to the dtype that it
multiplies in, which is a parameter. It may take the float32 weights of which its
operands are casts as further operands. It does not read them, but they are what it is
differentiated at: so their gradients are products that give float32, with no rounding
in between, and what the backward pass keeps are the 16 bits. Convolutions off CPUs give
16 bits, which are widened.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jamp._compat import is_saved
from jamp._dtypes import FLOAT32, in_dtype
from jamp._equations.binding import evaluated
from jamp._lowerings.late_casts import lower_with_weights
from jamp._lowerings.own_primitives import (
    Operation,
    like,
    missing,
    register,
    varying_like,
)
from jamp._lowerings.reversed_weights import lower_reversed
from jamp._lowerings.unrounded_operands import lower_unrounded

_batchers = batching.fancy_primitive_batchers
_saving = partial_eval.partial_eval_jaxpr_custom_rules
# One that JAX is configured for is for float32.
PRECISION = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)


class Taken(NamedTuple):
    """How a product on a CPU has got its operands.

    Attributes:
      wide: the operands before they were brought to 16 bits, if those are at hand.
      late: the places of operands that the product casts itself.
      whole: whether they are on one device.
    """

    wide: tuple[Any, Any]
    late: tuple[int, ...]
    whole: bool


def product_params(
    params: dict[str, Any],
    dtype: Any,
    weights: tuple[int, ...] = (),
    rounded: tuple[int, ...] = (),
    to: Any = None,
) -> dict[str, Any]:
    """The parameters of JAX's own product, and those of jamp's.

    They are the dtype to multiply in, which the result has too unless another is given,
    which operands are casts of the operands after the first two, and which of the first
    two were rounded for it alone, and not by the program.
    """
    return {
        **params,
        "precision": None,
        "preferred_element_type": dtype if to is None else to,
        "dtype": dtype,
        "weights": weights,
        "rounded": rounded,
    }


def _jax_params(params: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Parameters as JAX's own product has them, some of them others."""
    own = ("dtype", "weights", "rounded")
    return {**{n: value for n, value in params.items() if n not in own}, **others}


def in_float32(avals: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(in_dtype(aval, FLOAT32) for aval in avals)


def define(
    of_jax: Primitive,
    on_cpu: Operation,
    gradient: Operation,
    reads_as_is: Callable[..., bool] = lambda *_, **__: False,
    is_in_float32: Callable[..., bool] = lambda *_, **__: False,
    rounds_parts: Callable[..., bool] = lambda *_, **__: False,
) -> tuple[Primitive, Primitive]:
    """A product like one of JAX's, and the same for casts of weights.

    They have its name: whoever reads a program by names reads a product.

    Args:
      of_jax: the product of JAX's.
      on_cpu: what it is on CPUs, of operands in the dtype to multiply in, how they were
        taken, and the parameters.
      gradient: the cotangent of the left (0) or right (1) operand, in its dtype, from
        that number, the cotangent of the result, the operands and the parameters.
      reads_as_is: whether on CPUs one of the operands is worth no cast for this product
        alone, from its number, the operands and the parameters.
      is_in_float32: whether on CPUs it is in float32 anyway, from the operands and the
        parameters.
      rounds_parts: whether on CPUs it rounds one of the operands itself, part by part,
        from its number, the operands and the parameters.
    """

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        low = [in_dtype(aval, params["dtype"]) for aval in avals[:2]]
        same = _jax_params(params, preferred_element_type=None)
        result, _ = of_jax.abstract_eval(*low, **same)
        return in_dtype(result, params["preferred_element_type"])

    def run_on_cpu(whole: bool, *operands: Any, **params: Any) -> Any:
        pair, weights = operands[:2], operands[2:]
        low = [lax.convert_element_type(a, params["dtype"]) for a in pair]
        given = dict(zip(params["weights"], weights, strict=True))
        late = tuple(at for at, a in enumerate(pair) if a.dtype != params["dtype"])
        wide = given.get(0, pair[0]), given.get(1, pair[1])
        return on_cpu(*low, Taken(wide, late, whole), params)

    def define_rules(primitive: Primitive, primal: Primitive) -> None:
        ad.primitive_jvps[primitive] = partial(_jvp, primal, product)
        ad.primitive_transposes[primitive] = partial(_transpose, gradient)
        _batchers[primitive] = partial(_batch, primitive, of_jax)
        _saving[primitive] = partial(_save_like, of_jax)

    of_any, product = (like(of_jax, abstract_eval) for _ in range(2))
    on_cpus = (partial(run_on_cpu, whole) for whole in (False, True))
    register(of_any, partial(_run, of_jax), *on_cpus)
    unrounded = partial(lower_unrounded, of_any, is_in_float32, rounds_parts)
    lower = partial(lower_reversed, unrounded)
    mlir.register_lowering(product, lower, cacheable=False)
    define_rules(product, product)
    of_weights, differentiated = (like(of_jax, abstract_eval) for _ in range(2))
    for primitive in (of_weights, differentiated):
        again = primitive is differentiated
        rule = partial(lower_with_weights, lower, again, reads_as_is)
        mlir.register_lowering(primitive, rule, cacheable=False)
        define_rules(primitive, differentiated)
    return product, of_weights


def _run(of_jax: Primitive, lhs: Any, rhs: Any, *weights: Any, **params: Any) -> Any:
    low = [lax.convert_element_type(a, params["dtype"]) for a in (lhs, rhs)]
    made = wanted = params["preferred_element_type"]
    if of_jax is not lax.dot_general_p:
        made = params["dtype"]  # cuDNN convolves 16-bit arrays into such alone.
    same = _jax_params(params, precision=PRECISION, preferred_element_type=made)
    result = of_jax.bind(*low, **of_jax.get_bind_params(same))
    return lax.convert_element_type(result, wanted)


def _jvp(
    primal: Primitive,
    product: Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    result = primal.bind(*primals, **params)
    lhs, rhs, *_ = primals
    perturbed = [*tangents[:2]]
    for place, tangent in zip(params["weights"], tangents[2:], strict=True):
        perturbed[place] = tangent
    params = {**params, "weights": ()}
    tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
    for pair in ((perturbed[0], rhs), (lhs, perturbed[1])):
        if not any(isinstance(factor, ad.Zero) for factor in pair):
            tangent = ad.add_tangents(tangent, product.bind(*pair, **params))
    return result, tangent


def _transpose(
    gradient: Operation, cotangent: Any, *operands: Any, **params: Any
) -> list[Any]:
    factors = list(operands[:2])
    place = 0 if ad.is_undefined_primal(factors[0]) else 1
    weights = params["weights"]
    to = 2 + weights.index(place) if place in weights else place
    factors[place] = operands[to]
    gradients = [
        ad.Zero(operand.aval) if ad.is_undefined_primal(operand) else None
        for operand in operands
    ]
    if not isinstance(cotangent, ad.Zero):
        params = {**params, "weights": ()}
        gradients[to] = gradient(place, cotangent, *factors, **params)
    return gradients


def _batch(
    primitive: Primitive,
    of_jax: Primitive,
    axis_data: Any,
    operands: Sequence[Any],
    axes: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """One product for a stack of them, as JAX's own rule has it."""
    arrays, places = list(operands), list(axes)
    for pair in enumerate(params["weights"], start=2):
        # An operand and its weight are stacks along one axis, or neither is one.
        if len({places[at] for at in pair}) > 1:
            for at in pair:
                arrays[at] = batching.bdim_at_front(
                    arrays[at], places[at], axis_data.size
                )
                places[at] = 0
    if places[0] is places[1] is None:
        return primitive.bind(*arrays, **params), None
    stacked: list[Any] = []

    def batched(*pair: Any) -> Any:
        rule = _batchers[of_jax]
        same = _jax_params(params, preferred_element_type=None)
        result, axis = rule(axis_data, pair, places[:2], **same)
        stacked.append(axis)
        return result

    program = jax.make_jaxpr(batched)(*in_float32(map(jax.typeof, arrays[:2])))
    return run_as(primitive, of_jax, program, arrays, params), stacked[0]


def run_as(
    primitive: Primitive,
    of_jax: Primitive,
    program: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> Any:
    """Runs a program of JAX's with its one product of JAX's as one of jamp's.

    What it does to operands it does to their weights too.
    """
    jaxpr, low = program.jaxpr, list(operands[:2])
    primitives = [eqn.primitive for eqn in jaxpr.eqns]
    if of_jax not in primitives:
        # It is empty.
        shape = program.out_avals[0].shape
        zeros = jax.numpy.zeros(shape, params["preferred_element_type"])
        return varying_like(zeros, *low)
    at = primitives.index(of_jax)
    eqn = jaxpr.eqns[at]

    def prepared(arrays: Sequence[Any]) -> dict[Any, Any]:
        return evaluated(jaxpr.eqns[:at], dict(zip(jaxpr.invars, arrays, strict=True)))

    env = prepared(low)
    taken = [env[var] for var in eqn.invars]
    for place, wide in zip(params["weights"], operands[2:], strict=True):
        wides = [wide if here == place else array for here, array in enumerate(low)]
        taken.append(prepared(wides)[eqn.invars[place]])
    names = ("dtype", "weights", "rounded", "preferred_element_type")
    own = product_params(eqn.params, *(params[name] for name in names))
    env[eqn.outvars[0]] = primitive.bind(*taken, **own)
    return evaluated(jaxpr.eqns[at + 1 :], env)[jaxpr.outvars[0]]


def _save_like(
    of_jax: Primitive,
    saveable: Any,
    unknown: Sequence[bool],
    present: Sequence[bool],
    eqn: JaxprEqn,
) -> tuple[Any, ...]:
    """Has policies of `jax.checkpoint` asked of a primitive that they know.

    Policies such as `dots_saveable` tell primitives by identity.
    """
    needed = missing(eqn, present)
    if any(unknown):
        return None, eqn, [True], [True], needed
    avals = [atom.aval for atom in eqn.invars[:2]]
    # What a policy would move elsewhere is saved where it is.
    if is_saved(saveable(of_jax, *avals, **_jax_params(eqn.params))):
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], needed
