"""Kernels, each beside a plain JAX reference of the same signature."""

from jamp.pallas_kernels.unscale import all_finite as all_finite
from jamp.pallas_kernels.unscale import unscale_and_check as unscale_and_check

__all__ = ["all_finite", "unscale_and_check"]
