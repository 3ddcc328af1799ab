"""Weights are cast when they are multiplied, unless they are multiplied again."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

MARK = 'late_cast = "true"'
SIZE, LAYERS = 128, 8
SQUARE = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
WINDOW = jax.ShapeDtypeStruct((SIZE, SIZE, 3), jnp.float32)
SIGNAL = jax.ShapeDtypeStruct((2, SIZE, 5), jnp.float32)

autocast = functools.partial(jamp.autocast, device_type="cpu", dtype=jnp.bfloat16)


def layers(multiply):
    def apply(x, *weights):
        for weight in weights:
            x = jnp.abs(multiply(x, weight))
        return x

    return apply


apply = autocast(layers(jnp.matmul))
convolve = functools.partial(
    jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME"
)
MULTIPLIED = {
    "a product": (layers(jnp.matmul), SQUARE, SQUARE),
    "transposed weights": (layers(lambda x, w: x @ w.T), SQUARE, SQUARE),
    "weights on the left": (layers(lambda x, w: w @ x), SQUARE, SQUARE),
    "vmap": (
        jax.vmap(layers(lambda x, w: w @ x), (0, *[None] * LAYERS)),
        SQUARE,
        SQUARE,
    ),
    "convolutions": (layers(convolve), SIGNAL, WINDOW),
}


@pytest.mark.parametrize("form", MULTIPLIED)
def test_inference_holds_a_copy_of_one_weight_at_a_time(form, choose_processor):
    choose_processor("avx512_bf16")
    model, x, weight = MULTIPLIED[form]
    lowered = jax.jit(autocast(model)).lower(x, *[weight] * LAYERS)
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    assert used < LAYERS * weight.size * 2


FORMS = {
    "rows": (layers(jnp.matmul), False),
    "columns": (layers(lambda x, w: w @ x), True),
    "a row under vmap": (jax.vmap(layers(jnp.matmul), (0, *[None] * LAYERS)), False),
}
# The rows, and the features of each, for which a processor casts no weight.
UNCAST = [
    ("old", 12, SIZE),
    ("old", SIZE, SIZE),
    ("held back", SIZE, SIZE),
    ("avx512_bf16", 24, SIZE),
]


@pytest.mark.parametrize(("processor", "rows", "size"), UNCAST)
@pytest.mark.parametrize("form", FORMS)
def test_inference_reads_weights_as_they_are_where_a_cast_costs_more(
    form, processor, rows, size, choose_processor
):
    choose_processor(processor)
    model, transposed = FORMS[form]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, size)), jnp.float32)
    x = x.T if transposed else x
    weights = rng.normal(size=(LAYERS, size, size)) / size**0.5
    weights = jnp.asarray(weights, jnp.float32)
    lowered = jax.jit(autocast(model)).lower(x, *weights)
    assert lowered.as_text().count(MARK) == LAYERS
    compiled = lowered.compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used <= 2 * x.size * 4
    found, expected = compiled(x, *weights), np.asarray(model(x, *weights))
    two_roundings = 2.0**-7 * expected.max()
    found = found.astype(jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=two_roundings)


def test_inference_of_a_few_rows_takes_no_copies_on_a_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
    with jax.set_mesh(mesh):
        compiled = jax.jit(apply).lower(x, *[SQUARE] * LAYERS).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < LAYERS * SQUARE.size * 2


def lowered(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def decode(x, *weights):
    def step(x):
        return apply(x, *weights).astype(x.dtype)

    return jax.lax.while_loop(lambda x: x[0, 0] < 1, step, x)


def iterate(x, *weights):
    def step(x, _):
        return apply(x, *weights).astype(x.dtype), None

    return jax.lax.scan(step, x, length=3)[0]


def total(x, *weights):
    return apply(x, *weights).astype(jnp.float32).sum()


def repeated_between(x, w, v):
    """One operation reads the weight more often than users are looked at."""
    x = apply(x, w)
    return jnp.concatenate([w] * 17), apply(x, w)


AGAIN = {
    "a loop": decode,
    "a scan": iterate,
    "a jitted function, which a loop may call": lambda *a: jax.jit(apply)(*a),
    "a backward pass": jax.grad(total, 1),
    "a backward pass that comes later": lambda *a: (total(*a), jax.grad(total, 1)(*a)),
    "a layer with the same weight": lambda x, w, v: apply(x, v, w, v, w),
    "a layer behind what reads it often": repeated_between,
    "another call": lambda x, *weights: apply(apply(x, *weights), *weights),
}


@pytest.mark.parametrize("rows", [8, SIZE])
@pytest.mark.parametrize("where", AGAIN)
def test_a_weight_stays_cast_for(where, rows, choose_processor):
    choose_processor("old")
    x = jax.ShapeDtypeStruct((rows, SIZE), jnp.float32)
    assert MARK in lowered(apply, x, SQUARE, SQUARE)
    assert MARK not in lowered(AGAIN[where], x, SQUARE, SQUARE)


def test_a_weight_waits_for_no_operand_beside_which_it_is_small(choose_processor):
    choose_processor("avx512_bf16")
    x = jax.ShapeDtypeStruct((SIZE**2, SIZE), jnp.float32)
    assert MARK not in lowered(apply, x, SQUARE, SQUARE)


@pytest.mark.parametrize("rows", [8, SIZE])
@pytest.mark.parametrize(
    ("twice", "once"),
    [
        (lambda *a: (total(*a), jax.grad(total)(*a)), jax.value_and_grad(total)),
        (lambda *a: (jax.grad(total)(*a), total(*a)), jax.value_and_grad(total)),
        (lambda *a: (apply(*a), total(*a)), apply),
    ],
    ids=["loss, then gradient", "gradient, then loss", "inference twice"],
)
def test_what_is_computed_twice_is_one_computation(twice, once, rows):
    x = jax.ShapeDtypeStruct((rows, SIZE), jnp.float32)
    found, expected = (
        jax.jit(fn).lower(x, *[SQUARE] * 3).compile().as_text().count(" dot(")
        for fn in (twice, once)
    )
    assert found == expected


def test_others_cast_as_before(choose_processor):
    choose_processor("old")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct(SQUARE.shape, SQUARE.dtype, sharding=rows)
    on_gpu = jax.jit(apply).trace(SQUARE, SQUARE, SQUARE)
    for text in (
        lowered(apply, x, SQUARE, SQUARE),
        on_gpu.lower(lowering_platforms=("cuda",)).as_text(),
        on_gpu.lower(lowering_platforms=("cpu", "cuda")).as_text(),
        str(jax.export.export(jax.jit(apply))(SQUARE, SQUARE, SQUARE).mlir_module()),
    ):
        assert MARK not in text


def test_nothing_is_multiplied_with_a_weight():
    nothing = jnp.zeros((0, SIZE))
    found = jax.jit(apply)(nothing, *[jnp.ones((SIZE, SIZE))] * LAYERS)
    assert found.shape == nothing.shape


@pytest.mark.parametrize("form", MULTIPLIED)
def test_the_result_is_that_of_float32_where_16_bits_are_exact(form):
    model, x, weight = MULTIPLIED[form]
    rng = np.random.default_rng(0)

    def permutation():
        """Weights that move each element somewhere else, and may change its sign."""
        found = np.zeros(weight.shape, np.float32)
        window = [[rng.integers(size)] * SIZE for size in weight.shape[2:]]
        found[(range(SIZE), rng.permutation(SIZE), *window)] = rng.choice([-1, 1], SIZE)
        return jnp.asarray(found)

    x = jnp.asarray(rng.integers(-128, 128, x.shape), x.dtype)
    weights = [permutation() for _ in range(LAYERS)]
    found = jax.jit(autocast(model))(x, *weights)
    np.testing.assert_array_equal(found.astype(jnp.float32), model(x, *weights))
