"""The reference in plain JAX, which XLA compiles for every device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

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
        # In at least float32; not promoted, as float8 has no implicit promotion.
        wide = [
            leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)
            for leaf in leaves
        ]
        outputs = [
            (number * inv_scale).astype(leaf.dtype)
            for number, leaf in zip(wide, leaves, strict=True)
        ]
    # What is not finite before is not finite after either: inf * 0 is NaN.
    read = outputs if request.unscale else leaves
    not_finite = [~jnp.isfinite(leaf).all() for leaf in read]
    found = jnp.stack(not_finite).any() if not_finite else jnp.array(False)
    return outputs, found.astype(jnp.float32)
