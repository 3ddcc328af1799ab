"""Convolutions of every kind, which tests compute in several ways."""

import functools

import jax
from jax import lax
from products import integers

NHWC = ("NHWC", "HWIO", "NHWC")
CONVOLUTIONS = {
    "1x1": ((2, 4, 4, 3), (1, 1, 3, 5), {}),
    "1x1 with strides": ((2, 5, 5, 3), (1, 1, 3, 5), dict(window_strides=(2, 2))),
    "3x3, few features": ((2, 5, 5, 3), (3, 3, 3, 5), dict(padding="SAME")),
    "3x3, many features": ((2, 5, 5, 3), (3, 3, 3, 130), dict(padding="SAME")),
    "strides": ((2, 7, 6, 3), (3, 3, 3, 130), dict(window_strides=(2, 3))),
    "strides, few features": ((2, 7, 6, 3), (3, 3, 3, 2), dict(window_strides=(2, 2))),
    "strides, a larger window": (
        (2, 7, 9, 3),
        (3, 5, 3, 130),
        dict(window_strides=(1, 2), padding=[(1, 1), (2, 1)]),
    ),
    "dilated window": ((2, 7, 7, 3), (2, 3, 3, 130), dict(rhs_dilation=(2, 1))),
    "transposed": ((2, 3, 4, 3), (3, 2, 3, 130), dict(lhs_dilation=(2, 3))),
    "both dilated": (
        (1, 4, 4, 2),
        (2, 2, 2, 3),
        dict(lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
    "padding of one side": (
        (2, 4, 4, 3),
        (3, 3, 3, 130),
        dict(padding=[(0, 2), (1, 0)]),
    ),
    "negative padding": (
        (2, 6, 6, 3),
        (3, 3, 3, 130),
        dict(padding=[(-1, 1), (0, -1)]),
    ),
    "groups": ((2, 4, 4, 4), (3, 3, 2, 6), dict(feature_group_count=2)),
    "groups of the batch": ((4, 4, 4, 2), (3, 3, 2, 6), dict(batch_group_count=2)),
    "groups, 1x1": ((2, 4, 4, 4), (1, 1, 2, 6), dict(feature_group_count=2)),
    "groups with strides": (
        (2, 5, 4, 4),
        (3, 2, 2, 6),
        dict(feature_group_count=2, window_strides=(2, 1)),
    ),
    "groups, channels first": (
        (2, 4, 5, 5),
        (6, 2, 2, 3),
        dict(feature_group_count=2, dimension_numbers=("NCHW", "OIHW", "NCHW")),
    ),
    "groups, mixed orders": (
        (5, 2, 4, 6),
        (3, 2, 6, 2),
        dict(feature_group_count=3, dimension_numbers=("HNWC", "WIOH", "CWNH")),
    ),
    "groups, transposed": (
        (2, 3, 3, 4),
        (1, 2, 2, 6),
        dict(feature_group_count=2, lhs_dilation=(2, 3)),
    ),
    "two of each feature": ((2, 5, 4, 3), (3, 3, 1, 6), dict(feature_group_count=3)),
    "depthwise": (
        (2, 5, 6, 4),
        (3, 2, 1, 4),
        dict(feature_group_count=4, padding=[(1, 1), (0, 1)]),
    ),
    "depthwise, of many rows": (
        (1, 19, 3, 2),
        (3, 2, 1, 2),
        dict(feature_group_count=2, padding=[(1, 1), (0, 1)]),
    ),
    "depthwise, strides": (
        (2, 7, 6, 4),
        (3, 3, 1, 4),
        dict(feature_group_count=4, window_strides=(2, 3)),
    ),
    "depthwise, dilated window": (
        (2, 9, 7, 2),
        (3, 2, 1, 2),
        dict(feature_group_count=2, rhs_dilation=(2, 3), window_strides=(2, 1)),
    ),
    "depthwise, transposed": (
        (2, 3, 4, 2),
        (3, 2, 1, 2),
        dict(feature_group_count=2, lhs_dilation=(2, 3), padding=[(1, 1), (2, 0)]),
    ),
    "depthwise, transposed with gaps": (
        (2, 3, 4, 2),
        (1, 2, 1, 2),
        dict(feature_group_count=2, lhs_dilation=(2, 3)),
    ),
    "depthwise, both dilated": (
        (2, 3, 4, 2),
        (2, 2, 1, 2),
        dict(feature_group_count=2, lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
    "depthwise, negative padding": (
        (2, 6, 6, 2),
        (3, 2, 1, 2),
        dict(feature_group_count=2, padding=[(-1, 1), (3, -2)]),
    ),
    "depthwise, a large window": (
        (1, 9, 9, 2),
        (9, 8, 1, 2),
        dict(feature_group_count=2, padding="SAME"),
    ),
    "depthwise, channels first": (
        (2, 4, 5, 5),
        (4, 1, 2, 3),
        dict(feature_group_count=4, dimension_numbers=("NCHW", "OIHW", "NCHW")),
    ),
    "depthwise, mixed orders": (
        (5, 2, 4, 3),
        (3, 1, 3, 2),
        dict(feature_group_count=3, dimension_numbers=("HNWC", "WIOH", "CWNH")),
    ),
    "depthwise, 1D": (
        (2, 8, 3),
        (4, 1, 3),
        dict(
            feature_group_count=3,
            dimension_numbers=("NHC", "HIO", "NHC"),
            padding=[(3, 0)],
        ),
    ),
    "depthwise, 3D": (
        (1, 4, 3, 5, 2),
        (2, 3, 2, 1, 2),
        dict(feature_group_count=2, dimension_numbers=("NDHWC", "DHWIO", "NDHWC")),
    ),
    "depthwise, empty batch": ((0, 4, 4, 2), (3, 3, 1, 2), dict(feature_group_count=2)),
    "depthwise, smaller than the window": (
        (2, 2, 2, 2),
        (3, 3, 1, 2),
        dict(feature_group_count=2),
    ),
    "depthwise, a point": (
        (2, 4),
        (4, 1),
        dict(feature_group_count=4, dimension_numbers=("NC", "OI", "NC")),
    ),
    "one feature": ((2, 5, 5, 1), (3, 3, 1, 1), dict(padding="SAME")),
    "channels first": (
        (2, 3, 5, 5),
        (130, 3, 2, 3),
        dict(dimension_numbers=("NCHW", "OIHW", "NCHW")),
    ),
    "mixed orders": (
        (5, 2, 4, 3),
        (3, 2, 130, 2),
        dict(dimension_numbers=("HNWC", "IHOW", "CWNH")),
    ),
    "1D": ((2, 6, 3), (3, 3, 130), dict(dimension_numbers=("NHC", "HIO", "NHC"))),
    "1D, strides": (
        (2, 11, 3),
        (5, 3, 130),
        dict(dimension_numbers=("NHC", "HIO", "NHC"), window_strides=(2,)),
    ),
    "3D": (
        (1, 3, 4, 3, 2),
        (2, 2, 2, 2, 130),
        dict(dimension_numbers=("NDHWC", "DHWIO", "NDHWC")),
    ),
    "side by side": ((2, 4, 6, 3), (2, 3, 3, 5), dict(window_strides=(2, 3))),
    "side by side, padded and cut": (
        (2, 5, 5, 3),
        (2, 2, 3, 5),
        dict(window_strides=(2, 2), padding=[(1, 0), (0, 0)]),
    ),
    "side by side, few windows": (
        (2, 8, 4, 3),
        (4, 4, 3, 5),
        dict(window_strides=(4, 4)),
    ),
    "side by side, many features": (
        (2, 4, 4, 3),
        (2, 2, 3, 130),
        dict(window_strides=(2, 2)),
    ),
    "side by side, channels first": (
        (2, 3, 4, 6),
        (5, 3, 2, 3),
        dict(dimension_numbers=("NCHW", "OIHW", "NCHW"), window_strides=(2, 3)),
    ),
    "side by side, mixed orders": (
        (6, 2, 4, 3),
        (3, 2, 5, 2),
        dict(dimension_numbers=("HNWC", "IHOW", "CWNH"), window_strides=(2, 2)),
    ),
    "side by side, 1D": (
        (2, 7, 3),
        (3, 3, 5),
        dict(dimension_numbers=("NHC", "HIO", "NHC"), window_strides=(3,)),
    ),
    "few places, and rows that meet none": (
        (2, 5, 4, 3),
        (3, 3, 3, 5),
        dict(window_strides=(2, 1), padding=[(1, 0), (0, 0)]),
    ),
    "places side by side": (
        (2, 4, 6, 3),
        (2, 3, 3, 5),
        dict(rhs_dilation=(2, 2)),
    ),
    "transposed side by side": (
        (2, 3, 2, 3),
        (2, 3, 3, 5),
        dict(lhs_dilation=(2, 3), padding=[(1, 1), (2, 2)]),
    ),
    "transposed side by side, padded and cut": (
        (2, 3, 2, 3),
        (2, 2, 3, 5),
        dict(lhs_dilation=(2, 2), padding=[(0, 2), (3, 0)]),
    ),
    "transposed side by side, mixed orders": (
        (3, 2, 4, 3),
        (3, 2, 5, 2),
        dict(
            dimension_numbers=("HNWC", "IHOW", "CWNH"),
            lhs_dilation=(2, 2),
            padding=[(1, 1), (1, 1)],
        ),
    ),
    "empty batch": ((0, 4, 4, 3), (3, 3, 3, 130), {}),
    "smaller than the window": ((2, 2, 2, 3), (3, 3, 3, 130), {}),
}


IN_PARTS = (
    "3x3, many features",
    "strides",
    "strides, a larger window",
    "channels first",
    "mixed orders",
    "1D, strides",
    "groups of the batch",
    "groups",
    "groups, mixed orders",
)


def example(name):
    """A convolution, and arrays of integers."""
    left, right, options = CONVOLUTIONS[name]
    spatial = len(left) - 2
    given = dict(window_strides=(1,) * spatial, padding=[(0, 0)] * spatial)
    fn = functools.partial(
        lax.conv_general_dilated,
        **{**given, "dimension_numbers": NHWC, **options},
    )
    return fn, *(jax.device_put(integers(i, s)) for i, s in enumerate((left, right)))
