"""The reference in plain JAX, which XLA compiles for every device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jamp._dtypes import widened
from jamp.pallas_kernels.unscale.launches import Request, Results


def run(leaves: Sequence[jax.Array], inv_scale: jax.Array, request: Request) -> Results:
    """Unscales and checks leaves of any inexact dtype.

    Args:
      leaves: arrays of any shape.
      inv_scale: the inverse of the loss scale, float32[].
      request: what to do.
    """
    outputs = []
    if request.unscale:
        outputs = [(widened(leaf) * inv_scale).astype(leaf.dtype) for leaf in leaves]
    # What is not finite before is not finite after either: inf * 0 is NaN.
    read = outputs if request.unscale else leaves
    not_finite = [~jnp.isfinite(leaf).all() for leaf in read]
    found = jnp.stack(not_finite).any() if not_finite else jnp.array(False)
    return outputs, found.astype(jnp.float32)
