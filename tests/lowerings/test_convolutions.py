"""Convolutions of jamp's own, as they are bound under autocast, against JAX's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import CONVOLUTIONS, IN_PARTS, NHWC, example
from jax import export, lax
from products import assert_equal_derivatives, cast, integers

import jamp
from jamp._dtypes import BFLOAT16, FLOAT32
from jamp._lowerings import convolution, patches, places, slices
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

# They take the forms of others, along other dimensions or from other places.
VARIED = re.compile("channels first|mixed orders|1D|3D|padd|dilated")


def whole_and_in_parts(names):
    each = [*((name, 2**24) for name in names), *((name, 64) for name in IN_PARTS)]
    return pytest.mark.parametrize(
        ("name", "at_once"),
        [
            pytest.param(
                *one, marks=pytest.mark.numbers if VARIED.search(one[0]) else ()
            )
            for one in each
        ],
    )


# Others are not made of patches, whichever way these are taken.
OF_PATCHES = [n for n in CONVOLUTIONS if "1x1" not in n and "depthwise" not in n]


def products_of(fn, *args):
    """What each product takes, without the dimension more that it may have in front."""
    text = jax.jit(fn).lower(*args).as_text()
    taken = r"tensor<(?:1x)?(.*)xbf16>"
    return re.findall(rf"dot_general .*: \({taken}, {taken}\) ->", text)


def temporary_bytes(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@whole_and_in_parts(CONVOLUTIONS)
@pytest.mark.usefixtures("amx")
def test_convolutions_of_every_kind_and_their_derivatives(name, at_once, monkeypatch):
    monkeypatch.setattr(slices, "_MOST_BYTES_WITH_AMX", at_once)
    monkeypatch.setattr(patches, "_LEAST_BYTES", 0)
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 1)
    assert_equal_derivatives(*example(name))


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if "by side" in name])
@pytest.mark.usefixtures("amx")
def test_what_lies_side_by_side_needs_no_slices(name, monkeypatch):
    monkeypatch.setattr(convolution, "_MOST_SLICES", 0)
    monkeypatch.setattr(convolution, "_LEAST_IN_TILES", 1)
    monkeypatch.setattr(convolution, "_LEAST_REUSED_IF_FAST", 1)
    monkeypatch.setattr(convolution, "_LEAST_REUSED_WITH_AMX", 1)
    fn, x, y = example(name)
    assert_equal_derivatives(fn, x, y)
    text = jax.jit(cast(fn)).lower(x, y).as_text()
    assert not re.search(r"stablehlo.(\w*slice|concatenate|convolution)\b", text)


@pytest.mark.usefixtures("amx")
def test_pictures_with_features_first_are_transposed_and_not_their_patches():
    x, w = jnp.ones((4, 16, 16, 16)), jnp.ones((64, 16, 3, 3))

    def loss(w, x):
        return jnp.sum(lax.conv(x, w, (1, 1), "SAME").astype(jnp.float32))

    assert products_of(jax.value_and_grad(cast(loss)), w, x) == [
        ("4x16x16x144", "144x64"),
        ("4x16x16x64", "4x16x16x9x16"),
    ]


@pytest.mark.parametrize(
    ("described", "features", "pictures", "left_to_xla"),
    [
        ("amx_bf16", 16, (2, 8), 3),
        ("amx_bf16", 32, (2, 8), 2),
        ("amx_bf16", 48, (2, 8), 0),
        ("amx_bf16", 64, (2, 8), 0),
        ("amx_bf16", 64, (1, 128), 0),
        ("amx_bf16", 64, (2, 128), 0),
        ("avx512_bf16", 16, (2, 8), 3),
        ("avx512_bf16", 32, (2, 8), 2),
        ("avx512_bf16", 64, (2, 8), 0),
        ("avx512_bf16", 64, (1, 128), 1),
        ("avx512_bf16", 128, (1, 128), 0),
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


@pytest.mark.parametrize(
    ("pixels", "out", "left_to_xla"), [(64, 64, 1), (64, 96, 0), (32, 64, 0)]
)
@pytest.mark.usefixtures("amx")
def test_few_features_of_large_pictures_are_left_to_xla(pixels, out, left_to_xla):
    x = jax.ShapeDtypeStruct((2, pixels, pixels, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 32, out), jnp.float32)

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    text = jax.jit(cast(convolve)).lower(x, w).as_text()
    assert text.count("stablehlo.convolution") == left_to_xla


@pytest.mark.usefixtures("amx")
def test_training_a_convolution_takes_less_memory_than_in_float32(monkeypatch):
    """No float32 copy of the pictures that patches are taken from, in particular."""
    monkeypatch.setattr(slices, "_MOST_BYTES_WITH_AMX", 2**20)
    x, w = jnp.ones((8, 64, 64, 64)), jnp.ones((3, 3, 64, 128))

    def loss(w, x):
        padding = [(1, 1), (1, 1)]
        y = lax.conv_general_dilated(x, w, (2, 2), padding, dimension_numbers=NHWC)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    wide = temporary_bytes(jax.grad(loss), w, x)
    assert temporary_bytes(jax.grad(cast(loss)), w, x) < wide


@pytest.mark.skipif(
    MOVES_BFLOAT16_AS_FLOAT32, reason="XLA rounds whole pictures on this release"
)
@pytest.mark.parametrize(
    ("made", "written"),
    [(lambda x: x, False), (jnp.tanh, True)],
    ids=["an argument", "made by the program"],
)
@pytest.mark.usefixtures("amx")
def test_pictures_that_are_there_anyway_are_not_written_in_16_bits(
    made, written, monkeypatch
):
    monkeypatch.setattr(slices, "_MOST_BYTES_WITH_AMX", 2**20)
    x, w = jnp.ones((8, 32, 32, 64)), jnp.ones((3, 3, 64, 128))

    def loss(w, x):
        y = lax.conv_general_dilated(made(x), w, (2, 2), "SAME", dimension_numbers=NHWC)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(cast(loss))).lower(w, x).compile()
    assert ("bf16[8,32,32,64]" in compiled.as_text()) == written


@pytest.mark.usefixtures("amx")
def test_gradients_of_weights_of_each_example_take_no_more_memory_than_float32():
    """Slices of one picture at a time, and not of all."""
    x, w = jnp.ones((4, 64, 64, 64)), jnp.ones((4, 3, 3, 64, 64))

    def convolve(x, w):
        return lax.conv_general_dilated(
            x[None], w, (1, 1), "SAME", dimension_numbers=NHWC
        )

    def loss(w, x):
        return jnp.mean(jax.vmap(convolve)(x, w).astype(jnp.float32) ** 2)

    wide = temporary_bytes(jax.grad(loss), w, x)
    assert temporary_bytes(jax.grad(cast(loss)), w, x) < wide


@pytest.mark.usefixtures("on_processor")
def test_weights_that_are_stored_in_16_bits_convolve_alike():
    x, w = (jax.random.normal(jax.random.key(i), (5, 5, 5, 5)) for i in range(2))
    fn = jax.jit(cast(lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME")))
    np.testing.assert_array_equal(fn(w, x), fn(w.astype(jnp.bfloat16), x))


def test_a_convolution_of_pictures_of_any_size_can_be_exported():
    """Its padding depends on the size."""
    options = dict(padding="SAME", dimension_numbers=NHWC)
    fn = jax.jit(cast(lambda x, w: lax.conv_general_dilated(x, w, (2, 2), **options)))
    x, w = (integers(i, s) for i, s in enumerate([(2, 7, 7, 3), (3, 3, 3, 4)]))
    shape = export.symbolic_shape("b, h, h, 3")
    exported = export.export(fn)(jax.ShapeDtypeStruct(shape, x.dtype), w)
    np.testing.assert_array_equal(exported.call(x, w), fn(x, w))


def test_a_place_in_the_window_may_be_far_from_the_first():
    """Farther than the bits reach by which starts of slices are hidden from XLA."""
    far = 2**24
    x = jnp.zeros((1, far + 2, 1), BFLOAT16).at[0, far].set(3)
    w = jnp.array([1, 10], BFLOAT16).reshape(2, 1, 1)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, ("NWC", "WIO", "NWC"))
    conv = patches.ConvParams((1,), ((0, 0),), (1,), (far,), numbers, 1, 1)
    found = jax.jit(lambda x, w: patches.by_windows(x, w, conv, [2], FLOAT32))(x, w)
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


@pytest.mark.numbers
@whole_and_in_parts(OF_PATCHES)
@pytest.mark.usefixtures("amx")
def test_rows_of_windows_add_up_to_convolutions_of_every_kind(
    name, at_once, monkeypatch
):
    monkeypatch.setattr(slices, "_MOST_BYTES_WITH_AMX", at_once)
    monkeypatch.setattr(patches, "_LEAST_BYTES", 0)
    monkeypatch.setattr(patches, "_LEAST_ROWS", 0)
    monkeypatch.setattr(patches, "_writes_less_by_rows", lambda *_: True)
    monkeypatch.setattr(places, "_size_by_places", lambda *_: 2**62)
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 1)
    monkeypatch.setattr(convolution, "_LEAST_REUSED_WITH_AMX", 1)
    monkeypatch.setattr(convolution, "_LEAST_REUSED_BY_ROWS", 1)
    assert_equal_derivatives(*example(name))


@pytest.mark.parametrize(
    ("pixels", "features", "expected"),
    [
        (32, (64, 64), [("4x34x32x192", "192x192")]),
        # Of few features of pictures, patches are smaller than what would be added up.
        (32, (16, 64), [("4x32x32x144", "144x64")]),
        # In pictures of few rows, too many more would be multiplied.
        (8, (64, 64), [("4x8x8x576", "576x64")]),
    ],
)
@pytest.mark.usefixtures("amx")
def test_patches_are_of_rows_where_less_is_written_for_them(pixels, features, expected):
    x, w = jnp.ones((4, pixels, pixels, features[0])), jnp.ones((3, 3, *features))

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    assert products_of(cast(convolve), x, w) == expected


@pytest.mark.parametrize(
    ("features", "strides", "expected"),
    [
        ((64, 64), (1, 1), [("4x32x32x3x64", "4x32x32x3x64")]),
        ((64, 64), (1, 2), [("4x32x16x3x64", "4x32x16x3x64")]),
        # Rows of the cotangent would be more numbers than all that it meets.
        ((16, 64), (1, 1), [("4x32x32x64", "4x32x32x9x16")]),
        # A row of pictures that are strided over meets few rows of the cotangent.
        ((64, 64), (2, 1), [("4x16x32x64", "4x16x32x9x64")]),
    ],
)
@pytest.mark.usefixtures("amx")
def test_gradients_of_weights_are_of_rows_of_both_where_these_are_fewer_numbers(
    features, strides, expected
):
    x, w = jnp.ones((4, 32, 32, features[0])), jnp.ones((3, 3, *features))

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NHWC)
        return jnp.sum(y.astype(jnp.float32))

    assert products_of(jax.grad(cast(loss)), w, x) == expected


@pytest.mark.usefixtures("amx")
def test_what_parts_are_written_to_is_not_there_when_the_program_begins():
    """In inference, all convolutions of a network would take it at once."""
    x, w = jnp.ones((8, 64, 64, 64)), [jnp.ones((3, 3, 64, 64))] * 6

    def network(x, w):
        for weights in w:
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, weights, (1, 1), "SAME", dimension_numbers=NHWC
                )
            )
        return x

    wide = temporary_bytes(network, x, w)
    assert temporary_bytes(cast(network), x, w) < 1.5 * wide


@pytest.mark.usefixtures("amx")
def test_of_many_phases_a_program_stays_short():
    x, w = jnp.ones((1, 3, 3, 5)), jnp.ones((64, 64, 5, 5))

    def upsampled(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            [(63, 63)] * 2,
            lhs_dilation=(32, 32),
            dimension_numbers=NHWC,
        )

    text = jax.jit(cast(upsampled)).lower(x, w).as_text()
    assert text.count("stablehlo.convolution") == 1


def convolved_twice(w, x):
    options = dict(window_strides=(2, 2), padding="SAME", dimension_numbers=NHWC)
    x = jax.nn.relu(lax.conv_general_dilated(x, w, **options))
    return jnp.sum(lax.conv_general_dilated(x, w, **options).astype(jnp.float32))


def transposed(w, x):
    return lax.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=True)


@pytest.mark.parametrize("fn", [jax.grad(convolved_twice, 1), transposed])
def test_on_a_gpu_weights_are_cast_before_they_are_reversed(fn):
    """XLA takes cuDNN's gradient if a window is reversed right before it is read."""
    w, x = jnp.ones((3, 3, 8, 8)), jnp.ones((2, 8, 8, 8))
    traced = jax.jit(jamp.autocast(fn, device_type="gpu")).trace(w, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    made = dict(re.findall(r"(%\w+) = (.*)", text))
    weights = re.findall(
        r"stablehlo.convolution\(%\w+, (%\w+)\).*lhs_dilate = \[2, 2\]", text
    )
    assert weights
    for name in weights:
        while "stablehlo.transpose" in made[name]:
            name = re.search(r"%\w+", made[name])[0]
        assert re.search("stablehlo.reverse.*f16>", made[name])


def test_on_a_gpu_convolutions_give_16_bits():
    """CuDNN convolves 16-bit arrays into such alone."""
    w, x = jnp.ones((3, 3, 8, 8)), jnp.ones((2, 8, 8, 8))
    loss = jamp.autocast(convolved_twice, device_type="gpu")
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(w, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    made = re.findall(r"stablehlo.convolution.*-> tensor<\S*x(\w+)>", text)
    assert len(made) == 5
    assert {*made} == {"f16"}
