"""What tells larger from smaller bfloat16: on CPUs in float32, to the same end.

XLA of JAX 0.12 compares bfloat16 on CPUs an element at a time, so that relu takes five
times as long as in float32; in 0.10 top_k takes thirty times.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching

from jamp._dtypes import BFLOAT16, FLOAT32, eligible
from jamp._equations import replaced
from jamp._lowerings.own_primitives import like, lower

_OF_JAX = (
    *(lax.eq_p, lax.ge_p, lax.gt_p, lax.le_p, lax.lt_p, lax.ne_p, lax.max_p, lax.min_p),
    *(lax.argmax_p, lax.argmin_p, lax.clamp_p, lax.sign_p, lax.top_k_p),
)


def _define(known: Primitive) -> Primitive:
    """A primitive like one of JAX's, with its name and its rules."""

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        made, _ = known.abstract_eval(*avals, **params)
        return made

    primitive = like(known, abstract_eval)
    lower(primitive, known.bind, partial(_on_cpu, known))
    ad.primitive_jvps[primitive] = partial(_jvp, known)
    batching.fancy_primitive_batchers[primitive] = partial(_batch, known)
    return primitive


def _on_cpu(known: Primitive, /, *arrays: Any, **params: Any) -> Any:
    made = known.bind(*map(_widened, arrays), **params)
    dtype = jax.typeof(arrays[0]).dtype
    return jax.tree.map(lambda a: a.astype(dtype) if eligible(a.dtype) else a, made)


def _widened(array: Any) -> Any:
    """An array in float32, if it is in bfloat16, by its bits.

    Of a cast XLA may take what was rounded to bfloat16 instead, and not for the other
    operand: what is equal would not be any more.
    """
    if jax.typeof(array).dtype != BFLOAT16:
        return array
    bits = lax.bitcast_convert_type(array, jnp.uint16)
    wide = lax.convert_element_type(bits, jnp.uint32)
    return lax.bitcast_convert_type(lax.shift_left(wide, np.uint32(16)), FLOAT32)


def _jvp(
    known: Primitive, primals: Sequence[Any], tangents: Sequence[Any], /, **params: Any
) -> tuple[Any, Any]:
    given = [t for t in tangents if not isinstance(t, ad.Zero)]

    def rule(*arrays: Any) -> Any:
        rest = iter(arrays[len(primals) :])
        taken = [t if isinstance(t, ad.Zero) else next(rest) for t in tangents]
        return ad.primitive_jvps[known](arrays[: len(primals)], taken, **params)

    return _comparing_here(rule, [*primals, *given])


def _batch(
    known: Primitive, axis_data: Any, arrays: Sequence[Any], dims: Any, /, **params: Any
) -> tuple[Any, Any]:
    def rule(*arrays: Any) -> Any:
        batcher = batching.fancy_primitive_batchers[known]
        return batcher(axis_data, arrays, dims, **params)

    return _comparing_here(rule, arrays)


def _comparing_here(
    rule: Callable[..., tuple[Any, Any]], arrays: Sequence[Any]
) -> tuple[Any, Any]:
    """What a rule of JAX's gives for some arrays, with the primitives of here in it."""
    static: list[Any] = []

    def arrays_made(*arrays: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(rule(*arrays), _is_static)
        static[:] = tree, [leaf if _is_static(leaf) else None for leaf in leaves]
        return [leaf for leaf in leaves if not _is_static(leaf)]

    program = jax.make_jaxpr(arrays_made)(*map(jax.typeof, arrays))
    program = replaced(
        program,
        lambda eqn: eqn.primitive in OWN,
        lambda eqn: eqn.replace(primitive=OWN[eqn.primitive]),
        {},
    )
    outs = iter(jaxpr_as_fun(program)(*arrays))
    tree, leaves = static
    results: tuple[Any, Any] = tree.unflatten(
        [next(outs) if leaf is None else leaf for leaf in leaves]
    )
    return results


def _is_static(leaf: Any) -> bool:
    """Whether a rule's result is no array: a zero tangent, or an axis."""
    return isinstance(leaf, ad.Zero | int)


OWN = {known: _define(known) for known in _OF_JAX}
