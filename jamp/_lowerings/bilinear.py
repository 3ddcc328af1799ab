"""What the products of jamp's own, of matrices and of convolutions, have in common.

Each takes operands of any floating dtypes and brings them to the dtype that it
multiplies in, which is a parameter. It may take the float32 weights of which its
operands are casts as further operands. It does not read them, but they are what it is
differentiated at: so their gradients are products that give float32, with no rounding
in between, and what the backward pass keeps are the 16 bits.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from jamp._dtypes import in_dtype

# One that JAX is configured for is for float32.
PRECISION = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)

Operation = Callable[..., Any]


def product_params(
    params: dict[str, Any], dtype: Any, weights: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The parameters of JAX's own product, and those of jamp's.

    Args:
      params: of the product of JAX's.
      dtype: the dtype to multiply in, which the result has too.
      weights: which operands are casts of the operands after the first two.
    """
    return {
        **params,
        "precision": None,
        "preferred_element_type": dtype,
        "dtype": dtype,
        "weights": weights,
    }


def of_jax(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JAX's own product has them."""
    return {n: value for n, value in params.items() if n not in ("dtype", "weights")}


def define(known: Primitive, on_cpu: Operation, *gradients: Operation) -> Primitive:
    """A product like one of JAX's.

    It has the name of that, so that whoever reads a program by names reads a product.

    Args:
      known: the product of JAX's.
      on_cpu: what it is on CPUs, of operands in the dtype to multiply in; `wide` is
        the left one before it was brought to it, if that is at hand.
      *gradients: for the left and the right operand its cotangent, in its dtype, from
        that of the result, the operands and the parameters.
    """
    primitive = Primitive(known.name)

    def abstract_eval(lhs: Any, rhs: Any, *weights: Any, **params: Any) -> Any:
        low = [in_dtype(aval, params["dtype"]) for aval in (lhs, rhs)]
        same = {**of_jax(params), "preferred_element_type": None}
        result, _ = known.abstract_eval(*low, **same)
        return in_dtype(result, params["preferred_element_type"])

    primitive.def_abstract_eval(abstract_eval)

    @cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(partial(primitive.bind, **dict(params)))

    def evaluate(*operands: Any, **params: Any) -> Any:
        # As primitives of JAX are, also where jax.disable_jit runs a function by parts.
        with jax.disable_jit(False):
            return compiled(tuple(sorted(params.items())))(*operands)

    primitive.def_impl(evaluate)

    def run(lhs: Any, rhs: Any, *weights: Any, **params: Any) -> Any:
        low = [lax.convert_element_type(a, params["dtype"]) for a in (lhs, rhs)]
        wanted = params["preferred_element_type"]
        # cuDNN convolves 16-bit arrays into such alone.
        made = wanted if known is lax.dot_general_p else params["dtype"]
        same = {
            **of_jax(params),
            "precision": PRECISION,
            "preferred_element_type": made,
        }
        result = known.bind(*low, **known.get_bind_params(same))
        return lax.convert_element_type(result, wanted)

    def run_on_cpu(lhs: Any, rhs: Any, *weights: Any, **params: Any) -> Any:
        low = [lax.convert_element_type(a, params["dtype"]) for a in (lhs, rhs)]
        given = dict(zip(params["weights"], weights, strict=True))
        wide = given.get(0, lhs)
        return on_cpu(*low, wide=wide, **of_jax(params))

    for rule, platform in ((run, None), (run_on_cpu, "cpu")):
        lowered = mlir.lower_fun(rule, multiple_results=False)
        mlir.register_lowering(primitive, lowered, platform=platform)
    _differentiate(primitive, *gradients)
    _save_like(primitive, known)
    return primitive


def _differentiate(
    primitive: Primitive, lhs_gradient: Operation, rhs_gradient: Operation
) -> None:
    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        result = primitive.bind(*primals, **params)
        lhs, rhs, *_ = primals
        perturbed = [*tangents[:2]]
        for place, tangent in zip(params["weights"], tangents[2:], strict=True):
            perturbed[place] = tangent
        params = {**params, "weights": ()}
        tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
        for place, given in enumerate(perturbed):
            if not isinstance(given, ad.Zero):
                pair = (lhs, given) if place else (given, rhs)
                term = primitive.bind(*pair, **params)
                tangent = ad.add_tangents(tangent, term)
        return result, tangent

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
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
            rule = rhs_gradient if place else lhs_gradient
            gradients[to] = rule(cotangent, *factors, **{**params, "weights": ()})
        return gradients

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def batched(primitive: Primitive) -> Callable[[Operation], None]:
    """Registers the rule for stacks of operands, at least one of the two being one.

    The rule takes JAX's description of the axis, operands, the axes of the first two
    and parameters; it returns the stack of results and its axis.
    """

    def register(rule: Operation) -> None:
        def batch(
            axis_data: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any
        ) -> tuple[Any, Any]:
            arrays, places = list(operands), list(axes)
            for extra, place in enumerate(params["weights"], start=2):
                pair = _alike(axis_data.size, arrays, places, (place, extra))
                (arrays[place], arrays[extra]), places[place] = pair
            if places[0] is places[1] is None:
                return primitive.bind(*arrays, **params), None
            result: tuple[Any, Any] = rule(axis_data, arrays, places[:2], params)
            return result

        batching.fancy_primitive_batchers[primitive] = batch

    return register


def _alike(
    size: int, arrays: Sequence[Any], axes: Sequence[Any], places: tuple[int, int]
) -> tuple[tuple[Any, Any], Any]:
    """An operand and its weight, both stacks along one axis or neither."""
    low, wide = (arrays[place] for place in places)
    axis, other = (axes[place] for place in places)
    if axis is None and other is None:
        return (low, wide), None
    if axis is None:
        low, axis = batching.broadcast(low, size, 0, None), 0
    if other is None:
        wide, other = batching.broadcast(wide, size, 0, None), 0
    return (low, jax.numpy.moveaxis(wide, other, axis)), axis


def _save_like(primitive: Primitive, known: Primitive) -> None:
    """Has policies of `jax.checkpoint` asked of a primitive that they know.

    Policies such as `dots_saveable` tell primitives by identity.
    """

    def rule(
        saveable: Any, unknown: Sequence[bool], present: Sequence[bool], eqn: JaxprEqn
    ) -> tuple[Any, ...]:
        pairs = zip(eqn.invars, present, strict=True)
        needed = [v for v, there in pairs if isinstance(v, Var) and not there]
        if any(unknown):
            return None, eqn, [True], [True], needed
        avals = [atom.aval for atom in eqn.invars[:2]]
        answer = saveable(known, *avals, **of_jax(eqn.params))
        # What a policy would move elsewhere is saved where it is.
        if answer is True or type(answer).__name__ in ("Offloadable", "SaveableType"):
            return eqn, None, [False], [False], []
        return eqn, eqn, [False], [True], needed

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule
