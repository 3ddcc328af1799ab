"""Fourier transforms and complex numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from ._case import OpCase, normal, positive

_X = (normal(4, 8),)


# The others convert their real input to complex numbers before they transform it.
_REAL = {"rfft", "rfft2", "rfftn", "ihfft"}


def _fft_case(name: str) -> OpCase:
    return OpCase(
        f"fft_{name}",
        getattr(jnp.fft, name),
        _X,
        f"jnp.fft.{name}(x)",
        traces_16bit=name not in _REAL,
    )


_TRANSFORMS = tuple(
    _fft_case(name)
    for name in (
        "fft",
        "ifft",
        "fft2",
        "ifft2",
        "fftn",
        "ifftn",
        "rfft",
        "irfft",
        "rfft2",
        "irfft2",
        "rfftn",
        "irfftn",
        "hfft",
        "ihfft",
    )
)

_OTHERS = (
    OpCase("fft_fftshift", jnp.fft.fftshift, _X, "jnp.fft.fftshift(x)"),
    OpCase(
        "stft",
        lambda x: jax.scipy.signal.stft(x, nperseg=8)[2],
        (normal(2, 32),),
        "jax.scipy.signal.stft(x, nperseg=8)[2]",
        traces_16bit=False,
    ),
    OpCase(
        "polar",
        lambda r, theta: r * jnp.exp(1j * theta),
        (positive(4, 8), normal(4, 8)),
        "r * jnp.exp(1j * theta)",
    ),
    OpCase(
        "view_as_complex",
        lambda x: lax.complex(x[..., 0], x[..., 1]),
        (normal(4, 8, 2),),
        "lax.complex(x[..., 0], x[..., 1])",
        traces_16bit=False,
    ),
)

CASES = (*_TRANSFORMS, *_OTHERS)
