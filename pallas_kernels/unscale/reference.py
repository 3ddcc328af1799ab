"""The reference in plain JAX, which XLA compiles for every device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jamp._dtypes import widened
from jamp.pallas_kernels.unscale.launches import Request, Results


def run(leaves: Sequence[jax.Array], inv_scale: jax.Array, request: Request) -> Results:
    """Unscales and checks leaves of any shape and inexact dtype."""
    outputs = []
    if request.unscale:
        outputs = [_times(leaf, inv_scale) for leaf in leaves]
    # What is not finite before is not finite after either: inf * 0 is NaN.
    read = outputs if request.unscale else leaves
    not_finite = [~jnp.isfinite(leaf).all() for leaf in read]
    found = jnp.stack(not_finite).any() if not_finite else jnp.array(False)
    return outputs, found.astype(jnp.float32)


def _times(leaf: jax.Array, inv_scale: jax.Array) -> jax.Array:
    wide = widened(leaf)
    product: jax.Array = wide * inv_scale.astype(wide.dtype)
    return product.astype(leaf.dtype)
