"""What the backward pass keeps: 16-bit inputs, not the float32 inside of functions."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import program_figures
import pytest
from jaxprs import equations

import jamp
from jamp._equations.walks import nested
from jamp._lowerings.releases import MOVES_BFLOAT16_AS_FLOAT32

WIDE = (64, 128)

LOW = {"gpu": "float16", "cpu": "bfloat16"}


def loss_of(fn):
    """A function between two matmuls, and the sum of the result."""

    def loss(params, x):
        first, second = params
        return jnp.sum(fn(x @ first) @ second), None

    return loss


def arguments():
    rng = np.random.default_rng(0)
    shapes = [(32, WIDE[1]), (WIDE[1], 16), (WIDE[0], 32)]
    first, second, x = (jnp.float32(rng.standard_normal(s) / 4) for s in shapes)
    return (first, second), x


def saved(loss, **options):
    """Shapes and dtypes of activations of full size that are saved."""
    fn = jamp.autocast(loss, **options)
    found = program_figures.saved_for_backward(fn, *arguments())
    return sorted(str(residual.dtype) for residual in found if residual.shape == WIDE)


FUNCTIONS = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "standardize": jax.nn.standardize,
    "softmax of scaled scores": lambda h: jax.nn.softmax(h / 0.9 + 0.3),
}


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_a_float32_function_its_16_bit_input_and_output_are_saved(name, device_type):
    kept = saved(loss_of(FUNCTIONS[name]), device_type=device_type)
    assert kept == [LOW[device_type]] * 2


def test_on_cpus_a_mask_is_computed_again_with_the_softmax_that_reads_it():
    def masked(scores):
        seen = jnp.arange(WIDE[1]) % 3 > 0
        return jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min))

    assert saved(loss_of(masked), device_type="cpu") == ["bfloat16"] * 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_computed_again_gives_the_same_gradient(name):
    loss, args = loss_of(FUNCTIONS[name]), arguments()

    def gradient(fn):
        return jax.grad(lambda *args: fn(*args)[0])(*args)

    # The seam between 16 bits and float32 is where it is with all of it saved.
    found = gradient(jamp.autocast(loss, device_type="gpu"))
    expected = gradient(loss)
    for one, other in zip(found, expected, strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, atol=16 * 2**-11 * scale)


def test_a_function_that_float32_enters_saves_what_jax_saves():
    def loss(x):
        return jnp.sum(jax.nn.gelu(x)), None

    plain, cast = (
        [
            (residual.shape, residual.dtype)
            for residual in program_figures.saved_for_backward(fn, jnp.ones(8))
        ]
        for fn in (loss, jamp.autocast(loss))
    )
    assert cast == plain != []


def test_a_sort_inside_a_float32_function_is_not_run_again():
    def rank(x):
        return jax.nn.softmax(jnp.sort(x, axis=-1))

    policy = jamp.Policy.load("gpu").with_rules(float32=[rank])
    program = jax.make_jaxpr(
        jax.grad(
            lambda *args: jamp.autocast(
                loss_of(rank), device_type="gpu", policy=policy
            )(*args)[0]
        )
    )(*arguments())
    names = [eqn.primitive.name for eqn in equations(program.jaxpr)]
    assert names.count("sort") == 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 64)(tokens)
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.OptimizedLSTMCell(64))(nn.Embed(256, 64)(tokens))
        return nn.Dense(256)(x)


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("Model", [Transformer, Lstm])
def test_a_model_saves_less_than_float32(Model, device_type):
    tokens = jnp.zeros((2, 64), jnp.int32)
    params = jax.eval_shape(Model().init, jax.random.key(0), tokens)

    def loss(params, tokens):
        logits = Model().apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean(), None

    def total(fn):
        found = program_figures.saved_for_backward(fn, params, tokens)
        return program_figures.bytes_saved(found)["total"]

    # On CPUs with older JAX what a loop stacks is float32.
    stacks = Model is Lstm and device_type == "cpu" and MOVES_BFLOAT16_AS_FLOAT32
    most = 0.8 if stacks else 0.7
    assert total(jamp.autocast(loss, device_type=device_type)) < most * total(loss)


# log_softmax and standardize end in a jitted function, whose caller casts the result.
@pytest.mark.parametrize("name", ["gelu", "silu", "softmax"])
def test_gradients_enter_and_leave_what_is_run_again_in_16_bits(name):
    cast = jamp.autocast(loss_of(FUNCTIONS[name]), device_type="gpu")
    program = jax.make_jaxpr(jax.grad(lambda *args: cast(*args)[0]))(*arguments())
    dtypes = [
        str(var.aval.dtype)
        for eqn in equations(program.jaxpr)
        if eqn.params.get("differentiated")
        for var in (*eqn.invars, *eqn.outvars)
        if var.aval.shape == WIDE
    ]
    assert dtypes == ["float16"] * 3  # what came in, its gradient, that of the result


def behind_barriers(fn, device_type="gpu"):
    """The dtypes of arrays of full size that XLA has to write out."""
    cast = jamp.autocast(loss_of(fn), device_type=device_type)
    gradient = jax.jit(jax.grad(lambda *args: cast(*args)[0]))
    text = gradient.lower(*arguments()).as_text()
    barriers = re.findall("optimization_barrier .* : (.*)", text)
    return re.findall(r"tensor<64x128x(\w+)>", " ".join(barriers))


def test_what_is_cheap_to_run_again_stays_free_to_be_fused():
    assert behind_barriers(jax.nn.standardize) == []
    assert behind_barriers(jax.nn.softmax)


def normed(h):
    params = {"scale": jnp.ones(WIDE[1]), "bias": jnp.zeros(WIDE[1])}
    return nn.LayerNorm().apply({"params": params}, h)


def normed_by_hand(h, axis=-1):
    centred = h - h.mean(axis, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-5)


def swish_by_hand(h):
    return h * jax.nn.sigmoid(h)


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, swish_by_hand])
def test_a_norm_by_hand_and_its_activation_are_run_again_as_one(
    activation, device_type
):
    loss = loss_of(lambda h: activation(normed_by_hand(h)))
    found = saved(loss, device_type=device_type)
    assert "float32" not in found and len(found) == 2


@jax.named_scope("norm")
def normed_over_the_batch(h):
    return normed_by_hand(h, axis=0)


each_activation = pytest.mark.parametrize(
    "activation", [jax.nn.gelu, jax.nn.silu, swish_by_hand]
)


@each_activation
@pytest.mark.parametrize(
    ("norm", "device_type"),
    [(normed, "gpu"), (normed, "cpu"), (normed_over_the_batch, "cpu")],
)
def test_a_norm_and_its_activation_are_one_in_whatever_scopes(
    norm, device_type, activation
):
    loss = loss_of(lambda h: activation(norm(h)))
    assert saved(loss, device_type=device_type) == [LOW[device_type]] * 2


@each_activation
@pytest.mark.parametrize("norm", [normed, normed_over_the_batch])
def test_on_gpus_an_activation_and_its_norm_are_one_in_whatever_scopes(
    norm, activation
):
    loss = loss_of(lambda h: norm(activation(h)))
    assert saved(loss, device_type="gpu") == ["float16"] * 2


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("fn", [jax.nn.softmax, normed])
@pytest.mark.parametrize("scoped", [jax.named_scope("layer"), jax.vmap])
def test_a_layer_in_a_scope_of_its_own_is_kept_in_16_bits(scoped, fn, device_type):
    def loss(params, x):
        first, second = params
        h = scoped(lambda row: row @ first + second[:, 0])(x)
        return jnp.sum(fn(h) @ second), None

    assert saved(loss, device_type=device_type) == [LOW[device_type]] * 2


def test_the_gradient_that_an_activation_gives_a_norm_is_rounded_for_gpus():
    norm = normed_over_the_batch
    assert behind_barriers(lambda h: jax.nn.silu(norm(h))) == ["f16"]
    # Of several that read the norm, all are added up before.
    assert behind_barriers(lambda h: swish_by_hand(norm(h))) == ["f16"]
    # Those of a function in float32 may cancel, and what is exact needs no float32.
    assert behind_barriers(lambda h: jnp.exp(norm(h))) == []
    assert behind_barriers(lambda h: jax.nn.relu(norm(h))) == []


def test_the_gradient_through_a_norm_and_an_activation_is_that_of_float32():
    loss, args = loss_of(lambda h: jax.nn.silu(normed(h))), arguments()
    cast = jamp.autocast(loss, device_type="gpu")
    found, expected = (
        jax.grad(lambda *args, fn=fn: fn(*args)[0])(*args) for fn in (cast, loss)
    )
    for one, other in zip(found, expected, strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, atol=8 * 2**-11 * scale)


def looped(activation):
    def loss(params, x):
        first, second = params

        def step(h, _):
            return activation(normed(h @ second @ second.T)), None

        return jnp.sum(jax.lax.scan(step, x @ first, length=3)[0]), None

    return loss


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.tanh, swish_by_hand])
def test_of_a_norm_and_its_activation_a_loop_keeps_16_bits(activation, device_type):
    low = {"gpu": "float16", "cpu": "bfloat16"}[device_type]
    fn = jamp.autocast(looped(activation), device_type=device_type)
    found = program_figures.saved_for_backward(fn, *arguments())
    kept = [str(saved.dtype) for saved in found if saved.shape == (3, *WIDE)]
    if device_type == "cpu" and MOVES_BFLOAT16_AS_FLOAT32:
        low = "float32"  # what a loop stacks there, on its way
    assert kept == [low] * 2  # what enters the products, and the norm


@pytest.mark.numbers
@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
@pytest.mark.parametrize("activation", [jax.nn.gelu, jnp.tanh, swish_by_hand])
def test_the_gradient_of_a_loop_of_norms_and_activations_is_that_of_float32(
    activation, device_type
):
    loss, args = looped(activation), arguments()
    cast = jamp.autocast(loss, device_type=device_type)
    found, expected = (
        jax.grad(lambda *args, fn=fn: fn(*args)[0])(*args) for fn in (cast, loss)
    )
    eps = {"gpu": 2**-11, "cpu": 2**-8}[device_type]
    for one, other in zip(found, expected, strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, atol=8 * eps * scale)


@pytest.mark.parametrize(("device_type", "again"), [("gpu", False), ("cpu", True)])
def test_an_associative_scan_is_not_run_again_on_gpus(device_type, again):
    def decayed(h):
        decay = jax.nn.sigmoid(h)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        return jax.lax.associative_scan(combine, (decay, h))[1].mean(0)

    cast = jamp.autocast(loss_of(decayed), device_type=device_type)
    program = jax.make_jaxpr(jax.grad(lambda *args: cast(*args)[0]))(*arguments())
    held = [eqn for eqn in program.eqns if eqn.params.get("differentiated")]
    found = {inner.primitive.name for eqn in held for inner in nested([eqn])}
    assert ("pad" in found) == again


def test_forward_mode_and_second_derivatives_go_through_what_is_run_again():
    loss, (params, x) = loss_of(jax.nn.gelu), arguments()
    tangents = jax.tree.map(jnp.cos, params)

    def curvature(fn):
        slope = jax.grad(lambda params: fn(params, x)[0])
        return jax.jvp(slope, (params,), (tangents,))[1]

    found = curvature(jamp.autocast(loss, device_type="gpu"))
    for one, other in zip(found, curvature(loss), strict=True):
        np.testing.assert_allclose(one, other, atol=32 * 2**-11 * abs(other).max())


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_norm_that_is_kept_is_of_the_16_bits_that_are_kept(device):
    """XLA may spare the rounding in the forward pass; the backward pass reads it."""
    x, w, b = (
        jnp.float32(np.random.default_rng(0).standard_normal(shape))
        for shape in [(64, 8), (8, 4), (4,)]
    )

    def squares(w):
        h = x @ w + b
        unit = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
        return jnp.sum(unit * unit) + jnp.sum(h @ jnp.eye(4)) * 0

    gradient = jax.jit(jax.grad(jamp.autocast(squares, device_type=device)))(w)
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


def cross_entropy(x, w):
    labels = jax.nn.one_hot(jnp.arange(32) % 16, 16)
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(x @ w), -1))


def test_on_gpus_barriers_stand_before_16_bits_alone():
    """Before gradients and labels, XLA would write out what it computes of them."""
    x, w = jnp.ones((32, 8)), jnp.ones((8, 16))
    loss = jamp.autocast(cross_entropy, device_type="gpu")
    text = jax.jit(jax.grad(loss)).lower(x, w).as_text()
    barred = re.findall(r"optimization_barrier .* : (.*)", text)
    assert barred == ["tensor<32x16xf16>"]


@pytest.mark.parametrize("device_type", ["gpu", "cpu"])
def test_what_is_computed_again_can_be_transposed(device_type):
    def energy(x, y):
        return jnp.sum((x @ jnp.eye(4)) ** 2 * jax.nn.sigmoid(y @ jnp.eye(4)))

    x = jnp.arange(8.0).reshape(2, 4) / 8
    y = jnp.ones_like(x)
    gradient = jax.grad(jamp.autocast(energy, device_type=device_type))
    (found,) = jax.linear_transpose(lambda x: gradient(x, y), x)(x)
    np.testing.assert_allclose(found, gradient(x, y), rtol=1e-2)
