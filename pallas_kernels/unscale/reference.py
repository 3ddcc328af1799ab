"""The reference in plain JAX, which XLA compiles for every backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def unscale_and_check(tree: Any, inv_scale: Any) -> tuple[Any, jax.Array]:
    """Unscales a tree; see `jamp.pallas_kernels.unscale_and_check`."""
    unscaled = jax.tree.map(lambda leaf: _unscaled(leaf, inv_scale), tree)
    # What is not finite before is not finite after either: inf * 0 is NaN.
    return unscaled, ~all_finite(unscaled)


def all_finite(tree: Any) -> jax.Array:
    """Checks a tree; see `jamp.pallas_kernels.all_finite`."""
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if _is(leaf)]
    return jnp.stack(flags).all() if flags else jnp.array(True)


def _unscaled(leaf: Any, inv_scale: Any) -> Any:
    if not _is(leaf):
        return leaf
    # Not promoted: float8 has no implicit promotion.
    wide = leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.float32
    return (leaf.astype(wide) * jnp.asarray(inv_scale, jnp.float32)).astype(leaf.dtype)


def _is(leaf: Any) -> bool:
    """Whether a leaf holds numbers that may be infinite."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
