"""Convolutions of 16-bit arrays, whose gradients are convolutions of their kind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jamp._dtypes import FLOAT32, in_dtype
from jamp._equations import bind
from jamp._lowerings.bilinear import batched, define, product_params
from jamp._lowerings.patches import convolve_on_cpu

_SHAPE = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
)


def _convolution_on_cpu(lhs: Any, rhs: Any, *, wide: Any, **params: Any) -> Any:
    shape = {name: params[name] for name in _SHAPE}
    to = params["preferred_element_type"]
    return convolve_on_cpu(lhs, rhs, wide=wide, **shape, to=to)


def _of_jax(lhs: Any, rhs: Any, *, params: Mapping[str, Any]) -> Any:
    return lax.conv_general_dilated(lhs, rhs, **{name: params[name] for name in _SHAPE})


@cache
def _gradient_program(place: int, avals: Sequence[Any], shape: Any) -> Any:
    """JAX's program for the gradient of one operand: of the cotangent and the other."""
    cotangent, *operands = avals

    def gradient(cotangent: Any, other: Any) -> Any:
        def convolve(wanted: Any) -> Any:
            pair = (other, wanted) if place else (wanted, other)
            return _of_jax(*pair, params=dict(shape))

        return jax.linear_transpose(convolve, operands[place])(cotangent)[0]

    return jax.make_jaxpr(gradient)(cotangent, operands[1 - place])


def _gradient(place: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    wanted, other = (rhs, lhs) if place else (lhs, rhs)
    avals = [wanted.aval, jax.typeof(other)]
    avals = [jax.typeof(cotangent), *(reversed(avals) if place else avals)]
    shape = tuple((name, params[name]) for name in _SHAPE)
    program = _gradient_program(place, tuple(_in_float32(avals)), shape)
    params = {**params, "preferred_element_type": wanted.aval.dtype}
    return _run(program, [cotangent, other], params)


def _in_float32(avals: Iterable[Any]) -> list[Any]:
    return [in_dtype(aval, FLOAT32) for aval in avals]


convolution_p = define(
    lax.conv_general_dilated_p,
    _convolution_on_cpu,
    partial(_gradient, 0),
    partial(_gradient, 1),
)


@batched(convolution_p)
def _batch(
    axis_data: Any, operands: Sequence[Any], axes: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, int]:
    """One convolution for a stack of them, as JAX's own rule has it."""
    stacked: Callable[..., Any] = jax.vmap(
        partial(_of_jax, params=params),
        in_axes=tuple(axes),
        spmd_axis_name=axis_data.spmd_name,
    )
    program = jax.make_jaxpr(stacked)(*_in_float32(map(jax.typeof, operands[:2])))
    return _run(program, operands, params), 0


def _run(program: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Runs a program of JAX's with its one convolution of jamp's kind.

    What it does to operands it does to their weights too.
    """
    jaxpr, low = program.jaxpr, list(operands[:2])
    primitives = [eqn.primitive for eqn in jaxpr.eqns]
    if lax.conv_general_dilated_p not in primitives:
        # It is empty.
        return jnp.zeros(program.out_avals[0].shape, params["preferred_element_type"])
    at = primitives.index(lax.conv_general_dilated_p)
    eqn = jaxpr.eqns[at]
    env = _evaluated(jaxpr.eqns[:at], dict(zip(jaxpr.invars, low, strict=True)))
    extra = []
    for place, wide in zip(params["weights"], operands[2:], strict=True):
        wides = [wide if here == place else array for here, array in enumerate(low)]
        seen = _evaluated(jaxpr.eqns[:at], dict(zip(jaxpr.invars, wides, strict=True)))
        extra.append(seen[eqn.invars[place]])
    own = product_params(eqn.params, params["dtype"], params["weights"])
    own["preferred_element_type"] = params["preferred_element_type"]
    taken = [*(env[var] for var in eqn.invars), *extra]
    env[eqn.outvars[0]] = convolution_p.bind(*taken, **own)
    return _evaluated(jaxpr.eqns[at + 1 :], env)[jaxpr.outvars[0]]


def _evaluated(eqns: Sequence[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    for eqn in eqns:
        taken = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, taken), strict=True))
    return env
