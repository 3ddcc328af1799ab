"""Comparisons of bfloat16, which CPUs make in float32 with the same result.

XLA of JAX 0.12 compares bfloat16 on CPUs an element at a time, so that relu takes five
times as long as in float32; in 0.10 top_k takes thirty times.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jamp import _dtypes
from jamp._dtypes import BFLOAT16, FLOAT32, eligible
from jamp._lowerings.own_primitives import like, register, with_rules_of_jax

_OF_JAX = (
    *(lax.eq_p, lax.ge_p, lax.gt_p, lax.le_p, lax.lt_p, lax.ne_p, lax.max_p, lax.min_p),
    *(lax.argmax_p, lax.argmin_p, lax.clamp_p, lax.sign_p, lax.top_k_p),
)


def _define(of_jax: Primitive) -> Primitive:
    primitive = like(of_jax)
    register(primitive, of_jax.bind, partial(_on_cpu, of_jax))
    return primitive


# Whether their operands are rounded, or their results, these are the same.
_MONOTONE = frozenset({lax.max_p, lax.min_p, lax.clamp_p})


def _on_cpu(of_jax: Primitive, /, *arrays: Any, **params: Any) -> Any:
    widen = _dtypes.widened if of_jax in _MONOTONE else widened_by_bits
    made = of_jax.bind(*map(widen, arrays), **params)
    dtype = jax.typeof(arrays[0]).dtype
    return jax.tree.map(lambda a: a.astype(dtype) if eligible(a.dtype) else a, made)


def widened_by_bits(array: Any) -> Any:
    """An array in float32, if it is in bfloat16, by its bits.

    Of a cast XLA may take what was rounded to bfloat16 instead, and not for the other
    operand: what is equal would not be any more. But it counts operations on bits as
    arithmetic, and gives what has more of that than bytes to threads, however small.
    """
    if jax.typeof(array).dtype != BFLOAT16:
        return array
    bits = lax.bitcast_convert_type(array, jnp.uint16)
    wide = lax.convert_element_type(bits, jnp.uint32)
    return lax.bitcast_convert_type(lax.shift_left(wide, np.uint32(16)), FLOAT32)


OWN = {of_jax: _define(of_jax) for of_jax in _OF_JAX}
with_rules_of_jax(OWN)
