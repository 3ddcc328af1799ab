"""The state of a `jamp.GradScaler`."""

from typing import NamedTuple

import jax


class ScalerState(NamedTuple):
    """What changes from step to step; a pytree of arrays.

    Attributes:
      scale: the factor of the loss, float32[].
      growth_tracker: finite steps since the last overflow, or since an interval of
        them ended, int32[].
      hysteresis_tracker: overflows in a row, int32[]; counted up to the scaler's
        `hysteresis`.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
