"""The reference in plain JAX, which XLA compiles for every device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jamp._dtypes import widened
from jamp.pallas_kernels.unscale.launches import Request, Results


def run(
    leaves: Sequence[jax.Array], inv_scale: jax.Array | None, request: Request
) -> Results:
    """Unscales, if by a scale, and checks leaves of any shape and inexact dtype."""
    outputs = list(leaves) if inv_scale is None else unscaled(leaves, inv_scale)
    # What is not finite before is not finite after either: inf * 0 is NaN.
    not_finite = [~jnp.isfinite(leaf).all() for leaf in outputs]
    found = jnp.stack(not_finite).any() if not_finite else jnp.array(False)
    return outputs if request.unscale else [], found.astype(jnp.float32)


def unscaled(leaves: Sequence[jax.Array], inv_scale: jax.Array) -> list[jax.Array]:
    """The leaves times the inverse scale, each in its own dtype."""
    return [_times(leaf, inv_scale) for leaf in leaves]


def _times(leaf: jax.Array, inv_scale: jax.Array) -> jax.Array:
    wide = widened(leaf)
    product: jax.Array = wide * inv_scale.astype(wide.dtype)
    return product.astype(leaf.dtype)
