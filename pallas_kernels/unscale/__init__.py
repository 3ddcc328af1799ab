"""Unscaling of gradients and the check whether all of them are finite, in one pass."""

from __future__ import annotations

from typing import Any

import jax

from jamp.pallas_kernels.unscale import reference

_IMPLEMENTATIONS = ("auto", "xla")


def unscale_and_check(
    tree: Any, inv_scale: Any, *, implementation: str = "auto"
) -> tuple[Any, jax.Array]:
    """Multiplies every gradient by the inverse of the loss scale and checks them all.

    Args:
      tree: a pytree of arrays. Floating and complex leaves are multiplied in at least
        float32 and rounded back to their dtype; others pass through.
      inv_scale: the inverse of the loss scale, float32[].
      implementation: `'xla'` for plain JAX, `'auto'` for what is fastest here.

    Returns:
      The tree unscaled, and a bool[] that is True where a leaf holds an inf or a NaN,
      before or after.

    Raises:
      ValueError: an unknown implementation.
    """
    _check(implementation)
    return reference.unscale_and_check(tree, inv_scale)


def all_finite(tree: Any, *, implementation: str = "auto") -> jax.Array:
    """Checks whether a tree holds neither an inf nor a NaN.

    Args:
      tree: a pytree of arrays; only floating and complex leaves matter.
      implementation: `'xla'` for plain JAX, `'auto'` for what is fastest here.

    Returns:
      A bool[].

    Raises:
      ValueError: an unknown implementation.
    """
    _check(implementation)
    return reference.all_finite(tree)


def _check(implementation: str) -> None:
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r}; known are "
            f"{', '.join(_IMPLEMENTATIONS)}"
        )
