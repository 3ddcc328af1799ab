"""What holds a sum of 16-bit numbers to one rounding."""

import jax.numpy as jnp
import numpy as np
from devices import LOW

import jamp

TERMS = 20_000


def values(low, size=TERMS, scale=0.01):
    """Positive numbers of a 16-bit dtype, in float32."""
    drawn = np.random.default_rng(0).uniform(0.5, 1.5, size) * scale
    return jnp.float32(jnp.asarray(drawn, low))


def in_16_bits(fn, device):
    """A function of float32 arrays under autocast, which it takes in 16 bits."""
    low = LOW[device]
    return jamp.autocast(
        lambda *arrays: fn(*(array.astype(low) for array in arrays)),
        device_type=device,
    )


def assert_rounded_once(found, exact, low):
    """Holds numbers to the nearest ones of the 16-bit dtype, or one next to them."""
    exact = np.asarray(exact, np.float64)
    error = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact)
    assert error.max() <= 0.51 * float(jnp.finfo(low).eps)
