"""The reference in plain JAX, which XLA compiles for every device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jamp.pallas_kernels.unscale.launches import Findings, Request


def run(
    leaves: Sequence[jax.Array],
    inv_scale: jax.Array,
    request: Request,
    replicas: Sequence[int] | None = None,
) -> tuple[list[jax.Array], Findings]:
    """Unscales and checks leaves of any inexact dtype.

    Args:
      leaves: arrays of any shape.
      inv_scale: the inverse of the loss scale, float32[].
      request: what to do.
      replicas: for every leaf, how many devices hold the same shard of it; by default
        one.

    Returns:
      The leaves unscaled (an empty list if that is not requested), and the findings.
    """
    outputs = []
    if request.unscale:
        # In at least float32; not promoted, as float8 has no implicit promotion.
        outputs = [(_wide(leaf) * inv_scale).astype(leaf.dtype) for leaf in leaves]
    # What is not finite before is not finite after either: inf * 0 is NaN.
    read = outputs if request.unscale else leaves
    not_finite = [~jnp.isfinite(leaf).all() for leaf in read]
    squares = jnp.zeros((), jnp.float32)
    if request.squares:
        for leaf, count in zip(read, replicas or [1] * len(read), strict=True):
            squares = squares + jnp.sum(jnp.square(jnp.abs(_wide(leaf)))) / count
    found = jnp.stack(not_finite).any() if not_finite else jnp.array(False)
    return outputs, Findings(found.astype(jnp.float32), squares)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)
