"""What a reader in float32 takes from a product, beside the same in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from devices import LOW

import jamp

EYE = jax.device_put(np.eye(64, dtype=np.float32))


def activations(std, mean, dtype):
    x = np.random.default_rng(0).normal(mean, std, (8, 64))
    return jax.device_put(x.astype(dtype).astype(np.float32))


def both(fn, device, of=lambda fn: fn):
    """One program for what `of` makes of a function, under autocast and in float32.

    Of excess precision there would be more in one program than in two.
    """
    wrapped = jamp.autocast(lambda x: fn(x @ EYE), device_type=device)
    return jax.jit(
        lambda *args: (of(wrapped)(*args), of(fn)(*args)),
        compiler_options={"xla_allow_excess_precision": False},
    )


def assert_gradient_near(found, expected, roundings, device, rtol=0):
    """Within roundings of the largest number."""
    atol = roundings * jnp.finfo(LOW[device]).eps * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=atol, rtol=rtol)


def error_in_roundings(fn, x, device, of=lambda fn: fn):
    """Of the results, against float32 on the same 16-bit numbers."""
    found, expected = map(np.asarray, both(fn, device, of)(x))
    error = np.abs(found.astype(np.float32) - expected).max()
    return float(error / np.abs(expected).max() / jnp.finfo(LOW[device]).eps)
