"""Arrays that a backward pass computes something from again, on GPUs.

Behind a barrier XLA does not see that they equal the arrays of the forward pass, and so
keeps nothing that was computed from those. The barrier of `jax.checkpoint` would also
stand before the gradients and the float32 that the backward pass takes: all of these
XLA would write, and read again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching, partial_eval

from jamp._lowerings.own_primitives import like, missing, register

_recomputed_p = like(lax.copy_p, lambda aval, **_: aval)


@jax.custom_jvp
def recomputed(array: Any) -> Any:
    """The array itself; in what a checkpoint runs again, behind a barrier."""
    return array


def _run(array: Any, *, again: bool) -> Any:
    return lax.optimization_barrier(array) if again else array


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return _recomputed_p.bind(*primals, **params), tangents[0]


recomputed.defjvp(partial(_jvp, again=False))


def _transpose(cotangent: Any, *_: Any, **params: Any) -> list[Any]:
    del params
    return [cotangent]


def _batch(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    return _recomputed_p.bind(*arrays, **params), dims[0]


def _in_both_passes(
    saveable: Any, unknown: Sequence[bool], present: Sequence[bool], eqn: JaxprEqn
) -> Any:
    """How JAX takes a checkpoint apart: what runs before, and what it runs again."""
    del saveable
    again = eqn.replace(params={"again": True})
    needed = missing(eqn, present)
    return None if any(unknown) else eqn, again, unknown, [True], needed


register(_recomputed_p, _run)
ad.primitive_jvps[_recomputed_p] = _jvp
ad.primitive_transposes[_recomputed_p] = _transpose
batching.primitive_batchers[_recomputed_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_recomputed_p] = _in_both_passes
