"""Convolutions, transposed convolutions and patches."""

import flax.linen as nn
import jax
from jax import lax

from ._case import OpCase, normal

# Sequences, images and volumes, channels last, and kernels for them.
_SEQUENCE = (normal(2, 10, 3), normal(3, 3, 4))
_IMAGE = (normal(2, 8, 8, 3), normal(3, 3, 3, 4))
_VOLUME = (normal(2, 6, 6, 6, 3), normal(3, 3, 3, 3, 4))
_LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}
_LAYOUTS[3] = ("NDHWC", "DHWIO", "NDHWC")


def _conv(rank):
    def fn(x, w):
        return lax.conv_general_dilated(
            x, w, (1,) * rank, "SAME", dimension_numbers=_LAYOUTS[rank]
        )

    return fn


def _conv_transpose(rank):
    def fn(x, w):
        return lax.conv_transpose(
            x, w, (2,) * rank, "SAME", dimension_numbers=_LAYOUTS[rank]
        )

    return fn


def _conv_with_bias(x, kernel, bias):
    params = {"kernel": kernel, "bias": bias}
    return nn.Conv(4, (3, 3)).apply({"params": params}, x)


def _conv_tbc(x, w, b):
    layout = ("WNC", "WIO", "WNC")
    return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=layout) + b


def _patches(x):
    return lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID")


def _fold(columns):
    images = jax.ShapeDtypeStruct((2, 3, 6, 6), columns.dtype)
    return jax.linear_transpose(_patches, images)(columns)[0]


CASES = (
    OpCase(
        "conv1d", _conv(1), _SEQUENCE, 'lax.conv_general_dilated(x, w, (1,), "SAME")'
    ),
    OpCase(
        "conv2d",
        _conv_with_bias,
        (*_IMAGE, normal(4)),
        "nn.Conv(features, (3, 3))(x)",
    ),
    OpCase(
        "conv3d",
        _conv(3),
        _VOLUME,
        'lax.conv_general_dilated(x, w, (1, 1, 1), "SAME")',
    ),
    OpCase(
        "conv_transpose1d",
        _conv_transpose(1),
        _SEQUENCE,
        'lax.conv_transpose(x, w, (2,), "SAME")',
    ),
    OpCase(
        "conv_transpose2d",
        _conv_transpose(2),
        _IMAGE,
        'lax.conv_transpose(x, w, (2, 2), "SAME")',
    ),
    OpCase(
        "conv_transpose3d",
        _conv_transpose(3),
        (normal(2, 4, 4, 4, 3), normal(2, 2, 2, 3, 4)),
        'lax.conv_transpose(x, w, (2, 2, 2), "SAME")',
    ),
    OpCase(
        "conv_tbc",
        _conv_tbc,
        (normal(10, 2, 3), normal(3, 3, 4), normal(4)),
        'lax.conv_general_dilated(x, w, (1,), "VALID", '
        'dimension_numbers=("WNC", "WIO", "WNC")) + b',
    ),
    OpCase(
        "_convolution",
        _conv(2),
        _IMAGE,
        'lax.conv_general_dilated(x, w, (1, 1), "SAME")',
    ),
    OpCase(
        "convolution",
        _conv(2),
        _IMAGE,
        'lax.conv_general_dilated(x, w, (1, 1), "SAME")',
    ),
    OpCase(
        "im2col",
        _patches,
        (normal(2, 3, 6, 6),),
        'lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID")',
    ),
    OpCase(
        "col2im",
        _fold,
        (normal(2, 12, 5, 5),),
        "jax.linear_transpose(im2col, images)(columns)[0]",
    ),
)
