"""Convolutions of jamp's own, as they are bound under autocast, against JAX's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from products import assert_equal_derivatives, cast, integers

from jamp._dtypes import BFLOAT16, FLOAT32
from jamp._lowerings import convolution, patches

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


@pytest.mark.parametrize(
    ("name", "at_once"),
    [*((name, 2**24) for name in CONVOLUTIONS), *((name, 64) for name in IN_PARTS)],
)
@pytest.mark.usefixtures("amx")
def test_convolutions_of_every_kind_and_their_derivatives(name, at_once, monkeypatch):
    monkeypatch.setattr(patches, "_MOST_BYTES", at_once)
    monkeypatch.setattr(patches, "_LEAST_BYTES", 0)
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 1)
    assert_equal_derivatives(*example(name))


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if "by side" in name])
@pytest.mark.usefixtures("amx")
def test_what_lies_side_by_side_needs_no_slices(name, monkeypatch):
    monkeypatch.setattr(convolution, "_MOST_SLICES", 0)
    monkeypatch.setattr(convolution, "_LEAST_IN_TILES", 1)
    monkeypatch.setattr(convolution, "_LEAST_REUSED_IF_FAST", 1)
    fn, x, y = example(name)
    assert_equal_derivatives(fn, x, y)
    text = jax.jit(cast(fn)).lower(x, y).as_text()
    assert not re.search(r"stablehlo.(\w*slice|concatenate|convolution)\b", text)


@pytest.mark.usefixtures("amx")
def test_pictures_with_features_first_are_transposed_and_not_their_patches():
    x, w = jnp.ones((4, 16, 16, 16)), jnp.ones((64, 16, 3, 3))

    def loss(w, x):
        return jnp.sum(lax.conv(x, w, (1, 1), "SAME").astype(jnp.float32))

    text = jax.jit(jax.value_and_grad(cast(loss))).lower(w, x).as_text()
    taken = r"tensor<(?:1x)?(.*)xbf16>"
    products = re.findall(rf"dot_general .*: \({taken}, {taken}\) ->", text)
    assert products == [
        ("4x16x16x144", "144x64"),
        ("4x16x16x64", "4x16x16x9x16"),
    ]


@pytest.mark.parametrize(
    ("described", "features", "pictures", "left_to_xla"),
    [
        ("amx_bf16", 32, (2, 8), 3),
        ("amx_bf16", 64, (2, 8), 0),
        ("amx_bf16", 64, (1, 128), 1),
        ("amx_bf16", 64, (2, 128), 0),
        ("avx512_bf16", 32, (2, 8), 3),
        ("avx512_bf16", 64, (2, 8), 1),
        ("avx512_bf16", 128, (2, 8), 0),
        ("avx512_bf16", 128, (1, 128), 1),
        ("held back", 128, (2, 8), 3),
        ("held back", 256, (2, 8), 0),
        ("old", 128, (2, 8), 3),
        ("old", 256, (2, 8), 0),
    ],
)
def test_the_processor_tells_from_how_many_features_on_patches_are_taken(
    described, features, pictures, left_to_xla, choose_processor
):
    choose_processor(described)
    count, pixels = pictures
    x = jax.ShapeDtypeStruct((count, pixels, pixels, features), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, features, features), jnp.float32)

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(cast(loss), (0, 1))).lower(w, x).as_text()
    assert text.count("stablehlo.convolution") == left_to_xla


@pytest.mark.usefixtures("amx")
def test_training_a_convolution_takes_less_memory_than_in_float32(monkeypatch):
    """No float32 copy of the pictures that patches are taken from, in particular."""
    monkeypatch.setattr(patches, "_MOST_BYTES", 2**20)
    x, w = jnp.ones((8, 64, 64, 64)), jnp.ones((3, 3, 64, 128))

    def loss(w, x):
        padding = [(1, 1), (1, 1)]
        y = lax.conv_general_dilated(x, w, (2, 2), padding, dimension_numbers=NHWC)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def memory(fn):
        compiled = jax.jit(jax.grad(fn)).lower(w, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(cast(loss)) < memory(loss)


@pytest.mark.usefixtures("on_processor")
def test_weights_that_are_stored_in_16_bits_convolve_alike():
    x, w = (jax.random.normal(jax.random.key(i), (5, 5, 5, 5)) for i in range(2))
    fn = jax.jit(cast(lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME")))
    np.testing.assert_array_equal(fn(w, x), fn(w.astype(jnp.bfloat16), x))


def test_a_place_in_the_window_may_be_far_from_the_first():
    """Farther than the bits reach by which starts of slices are hidden from XLA."""
    far = 2**24
    x = jnp.zeros((1, far + 2, 1), BFLOAT16).at[0, far].set(3)
    w = jnp.array([1, 10], BFLOAT16).reshape(2, 1, 1)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, ("NWC", "WIO", "NWC"))
    shape = patches.Shape((1,), ((0, 0),), (1,), (far,), numbers, 1, 1)
    found = jax.jit(lambda x, w: patches.by_windows(x, w, shape, [2], FLOAT32))(x, w)
    np.testing.assert_array_equal(found.ravel(), [30, 0])


@pytest.mark.parametrize(("groups", "of_weights_alone"), [(8, False), (2, True)])
def test_what_xla_convolves_a_feature_at_a_time_it_is_not_given(
    groups, of_weights_alone
):
    """A depthwise convolution with its gradients, and what weights in groups get."""
    x, w = jnp.ones((2, 9, 9, 8)), jnp.ones((3, 3, 8 // groups, 8))

    def loss(w, x):
        y = lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
            feature_group_count=groups,
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def convolutions(fn):
        text = jax.jit(jax.grad(fn, (0, 1))).lower(w, x).compile().as_text()
        return text.count(" convolution(")

    assert convolutions(loss) == 3
    # Forward and for the gradient of the pictures, if at all.
    assert convolutions(cast(loss)) == (2 if of_weights_alone else 0)


@pytest.mark.usefixtures("amx")
def test_the_patches_of_a_vision_transformer_are_pictures_in_another_order():
    x, w = jnp.ones((2, 32, 32, 3)), jnp.ones((16, 16, 3, 8))

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, (16, 16), "VALID", dimension_numbers=NHWC)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(cast(loss), (0, 1))).lower(w, x).compile().as_text()
    for name in ("convolution(", "slice(", "concatenate("):
        assert f" {name}" not in text
