"""Logarithms of probabilities: exact, or an error that names the line.

In float16 a sigmoid or softmax is 0 or 1 exactly where its logarithm matters most.
"""

import functools
import linecache
import re
from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import LOW, each_device
from jax.scipy import special

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
# What float16 holds: a product with the identity does not round it.
LOGITS = jnp.asarray(np.linspace(-14, 14, 36), jnp.float16).reshape(6, 6)
LOGITS = LOGITS.astype(jnp.float32)
EYE = jnp.eye(6)


def in_halves(p):
    left, right = jnp.split(p, 2, axis=1)
    return jnp.stack([left, 1 - right])


def in_a_loop(h):
    def body(total, row):
        p = jax.nn.sigmoid(row @ EYE)
        return total + jnp.log(p).sum(), p

    total, probabilities = jax.lax.scan(body, 0.0, h)
    return total + probabilities.sum()


def in_a_disabled_region(h):
    y = h @ EYE
    with jamp.autocast(enabled=False):
        return jnp.log(jax.nn.sigmoid(y))


EXACT = {
    "log": lambda h: jnp.log(jax.nn.sigmoid(h @ EYE)),
    "log of the complement": lambda h: jnp.log(1 - jax.nn.sigmoid(h @ EYE)),
    "log1p": lambda h: jnp.log1p(-jax.nn.sigmoid(h @ EYE)),
    "log of what is shifted": lambda h: jnp.log(jax.nn.sigmoid(h @ EYE) + 1e-8),
    "log of what is clipped": lambda h: jnp.log(
        jnp.clip(jax.nn.sigmoid(h @ EYE), 1e-7, 1 - 1e-6)
    ),
    "log of what is moved": lambda h: jnp.log(
        jax.nn.sigmoid(h @ EYE).reshape(-1)[1:].T
    ),
    "log of halves": lambda h: jnp.log(in_halves(jax.nn.sigmoid(h @ EYE))),
    "log of a choice": lambda h: jnp.log(
        jnp.where(h > 0, jax.nn.sigmoid(h @ EYE), 1 - jax.nn.sigmoid(h @ EYE))
    ),
    "log beside a product": lambda h: (lambda p: jnp.log(p).mean() + (p @ EYE).mean())(
        jax.nn.sigmoid(h @ EYE)
    ),
    "log in a jitted helper": lambda h: jax.jit(jnp.log)(jax.nn.sigmoid(h @ EYE)),
    "betaln": lambda h: special.betaln(2.0, 10 * (1 - jax.nn.sigmoid(h @ EYE))),
    "log beside itself": lambda h: (
        lambda p: -p * jnp.log(p) - (1 - p) * jnp.log(1 - p)
    )(jax.nn.sigmoid(h @ EYE)),
    "log beside a jitted product": lambda h: jax.jit(
        lambda p: jnp.log(p).mean() + (p @ EYE).mean()
    )(jax.nn.softmax(h @ EYE)),
    "log in a loop": in_a_loop,
    "log of a softmax": lambda h: jnp.log(jax.nn.softmax(h @ EYE)),
    "log in a disabled region": in_a_disabled_region,
    "log of what no product gave": lambda h: jnp.log(jax.nn.sigmoid(h)),
    "log_sigmoid": lambda h: jax.nn.log_sigmoid(h @ EYE),
    "sigmoid_binary_cross_entropy": lambda h: optax.sigmoid_binary_cross_entropy(
        h @ EYE, jnp.ones((6, 6))
    ),
    "softmax_cross_entropy": lambda h: optax.softmax_cross_entropy(
        h @ EYE, jnp.ones((6, 6)) / 6
    ),
}


@pytest.mark.numbers
@each_device
@pytest.mark.parametrize("name", EXACT)
def test_a_logarithm_of_a_probability_is_that_of_float32(name, device):
    def loss(h):
        return 64 * EXACT[name](h).mean()

    logits = LOGITS.astype(LOW[device]).astype(jnp.float32)
    cast = jamp.autocast(loss, device_type=device)
    value, gradient = jax.value_and_grad(loss)(logits)
    found, found_gradient = jax.value_and_grad(cast)(logits)
    eps = jnp.finfo(LOW[device]).eps
    np.testing.assert_allclose(found, value, rtol=eps / 5)
    np.testing.assert_allclose(found_gradient, gradient, rtol=eps, atol=eps / 100)


def rounded(h):
    """Sigmoids that leave a program which is computed again, and so have 16 bits."""
    return jax.checkpoint(jax.nn.sigmoid)(h @ EYE)


def log(h):
    return jnp.log(rounded(h))  # unsafe


def log_of_the_complement(h):
    y = 1 - rounded(h)
    return jnp.log(y)  # unsafe


def log1p(h):
    return jnp.log1p(-rounded(h))  # unsafe


def log_of_what_is_clipped(h):
    y = jnp.clip(rounded(h), 1e-3, 1.0)
    return jnp.log(y)  # unsafe


def log_of_what_is_moved(h):
    y = rounded(h).reshape(-1)[1:].T
    return jnp.log(y)  # unsafe


def log_of_halves(h):
    y = in_halves(rounded(h))
    return jnp.log(y)  # unsafe


def log_of_a_choice(h):
    y = jnp.where(h > 0, rounded(h), 0.5)
    return jnp.log(y)  # unsafe


def log_of_a_rounded_softmax(h):
    y = jax.nn.softmax(h @ EYE).astype(jnp.float16)
    return jnp.log(y)  # unsafe


def log_of_a_rounded_softmax_widened(h):
    y = jax.nn.softmax(h @ EYE).astype(jnp.float16).astype(jnp.float32)
    return jnp.log(y)  # unsafe


def log_in_a_jitted_helper(h):
    return jax.jit(jnp.log)(rounded(h))  # unsafe


def log_of_what_a_jitted_helper_takes_in_16_bits(h):
    helper = jax.jit(lambda p: jnp.log(p.astype(jnp.float16)))  # unsafe
    return helper(jax.nn.softmax(h @ EYE))


def log_of_what_a_jitted_helper_shifts(h):
    y = jax.jit(lambda p: jnp.asarray(p + 1e-3, jnp.float32))(rounded(h))
    return jnp.log(y)  # unsafe


def log_of_what_a_jitted_helper_rounds(h):
    y = jax.jit(lambda h: rounded(h) + 1e-3)(h)
    return jnp.log(y)  # unsafe


def log_of_what_a_loop_gives(h):
    _, y = jax.lax.scan(lambda c, row: (c, jax.nn.sigmoid(row @ EYE)), 0.0, h)
    return jnp.log(y)  # unsafe


def log_of_what_a_loop_carries(h):
    def body(_, carry):
        return jax.nn.sigmoid(carry @ EYE)

    y = jax.lax.fori_loop(0, 2, body, (h @ EYE))
    return jnp.log(y)  # unsafe


def log_of_what_a_loop_takes_in_16_bits(h):
    def body(total, row):
        low = (row @ EYE).sum()
        return total + low + jnp.log(row).sum(), None  # unsafe

    return jax.lax.scan(body, 0.0, jax.nn.sigmoid(h @ EYE))[0]


def log_of_what_a_branch_gives(h):
    y = jax.lax.cond(h[0, 0] > 0, jax.nn.sigmoid, jnp.ones_like, h @ EYE)
    return jnp.log(y)  # unsafe


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, h):
        return jnp.log(rounded(nn.Dense(6)(h)))  # unsafe


def log_in_a_flax_module(h):
    return Classifier().init_with_output(jax.random.key(0), h)[0]


def beside_a_sigmoid(x):
    return jax.lax.optimization_barrier((jax.nn.sigmoid(x), x))[1]


def log_of_what_passes_a_barrier(h):
    x = h @ EYE
    _, p = jax.lax.optimization_barrier((x, jax.nn.sigmoid(x)))
    return jnp.log(p)  # unsafe


UNSAFE = [
    log,
    log_of_what_passes_a_barrier,
    log_of_the_complement,
    log1p,
    log_of_what_is_clipped,
    log_of_what_is_moved,
    log_of_halves,
    log_of_a_choice,
    log_of_a_rounded_softmax,
    log_of_a_rounded_softmax_widened,
    log_in_a_jitted_helper,
    log_of_what_a_jitted_helper_takes_in_16_bits,
    log_of_what_a_jitted_helper_shifts,
    log_of_what_a_jitted_helper_rounds,
    log_of_what_a_loop_gives,
    log_of_what_a_loop_carries,
    log_of_what_a_loop_takes_in_16_bits,
    log_of_what_a_branch_gives,
    log_in_a_flax_module,
]
ROUNDED_BY_HAND = [
    log_of_a_rounded_softmax,
    log_of_a_rounded_softmax_widened,
    log_of_what_a_jitted_helper_takes_in_16_bits,
]


@pytest.mark.parametrize("fn", UNSAFE)
def test_the_logarithm_of_a_rounded_probability_raises_and_names_the_line(fn):
    with pytest.raises(jamp.BannedOpError) as error:
        gpu(fn)(LOGITS)
    message = str(error.value)
    (number,) = re.findall(rf"{re.escape(__file__)}:(\d+)", message)
    assert linecache.getline(__file__, int(number)).endswith("# unsafe\n")
    assert re.search(r"\blog(1p)?\b", message)
    assert "float16" in message
    for way_out in ("log_sigmoid", "enabled=False"):
        assert way_out in message


@pytest.mark.parametrize("fn", UNSAFE)
def test_what_is_unsafe_in_float16_is_allowed_in_bfloat16(fn):
    h = LOGITS / 14
    assert np.isfinite(jamp.autocast(fn, device_type="cpu")(h)).all()
    if fn not in ROUNDED_BY_HAND:
        assert np.isfinite(gpu(fn, dtype=jnp.bfloat16)(h)).all()


@pytest.mark.parametrize(
    "fn",
    [
        lambda h: jnp.log(jnp.abs(h @ EYE) + 1),
        lambda h: jnp.log((h @ EYE) ** 2 * jax.nn.sigmoid(h @ EYE) + 1),
        lambda h: jnp.log(beside_a_sigmoid((h @ EYE) ** 2 + 1)),
    ],
)
def test_the_logarithm_of_what_is_no_probability_is_allowed(fn):
    np.testing.assert_allclose(gpu(fn)(LOGITS), fn(LOGITS), rtol=2e-3)


def test_a_disabled_region_takes_the_logarithm_of_any_probability():
    def fn(h):
        p = rounded(h)
        with jamp.autocast(enabled=False):
            return jnp.log(p.astype(jnp.float32) + 0.1)

    np.testing.assert_allclose(gpu(fn)(LOGITS), fn(LOGITS), atol=2e-3)


GROUPS = """
extends = "gpu"
dtype = "bfloat16"

[[unsafe]]
primitives = ["log"]
of = ["tanh"]
dtype = "bfloat16"
advice = "take the logarithm of neither"

[[unsafe]]
primitives = ["sqrt"]
of = ["logistic"]
dtype = "bfloat16"
advice = "take the square root of neither"
"""


@pytest.mark.parametrize("read, of", [(jnp.log, jnp.tanh), (jnp.sqrt, jax.nn.sigmoid)])
def test_each_group_of_a_table_bans_what_it_names_alone(read, of, tmp_path):
    table = tmp_path / "groups.toml"
    table.write_text(GROUPS)
    for other in (jnp.tanh, jax.nn.sigmoid):

        def fn(h, other=other):
            return read(jax.checkpoint(other)(h @ EYE))

        cast = jamp.autocast(fn, policy=jamp.Policy.load(table))
        error = pytest.raises(jamp.BannedOpError, match=r"root|logarithm")
        with error if other is of else nullcontext():
            cast(LOGITS)
