"""The gradient of a bias adds up what a loss sends to all rows, before any rounding.

Rows of a layer that begins with zeros are alike, and what a loss sends to them would be
rounded alike: in the sum nothing would average out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

RNG = np.random.default_rng(0)
ROWS, CLASSES = 512, 10
X = RNG.normal(size=(ROWS, 32)).astype("f")
# 16 bits hold what such a layer gives.
W, B = np.zeros((32, CLASSES), "f"), np.linspace(-1, 1.25, CLASSES, dtype="f")
LABELS = RNG.integers(0, CLASSES, ROWS)
TARGETS = np.eye(CLASSES, dtype="f")[LABELS]


def picked(h):
    log_probs = jax.nn.log_softmax(h)
    return -jnp.mean(jnp.take_along_axis(log_probs, LABELS[:, None], 1))


LOSSES = {
    "log_softmax": picked,
    "labels": lambda h: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(h, LABELS)
    ),
    "one-hot labels": lambda h: jnp.mean(optax.softmax_cross_entropy(h, TARGETS)),
    "by hand": lambda h: jnp.mean(
        jnp.log(jnp.exp(h - h.max(1, keepdims=True)).sum(1))
        + h.max(1)
        - h[jnp.arange(ROWS), LABELS]
    ),
    "binary": lambda h: jnp.mean(optax.sigmoid_binary_cross_entropy(h, TARGETS)),
    "Poisson": lambda h: jnp.mean(jnp.exp(h) - TARGETS * h),
    "of one class": lambda h: jnp.mean(
        optax.sigmoid_binary_cross_entropy(h[:, 1:2].squeeze(1), TARGETS[:, 1])
    ),
    "of flat rows": lambda h: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            h.reshape(2, -1, CLASSES).reshape(-1, CLASSES), LABELS
        )
    ),
    "squared": lambda h: jnp.mean((jax.nn.softmax(h) - TARGETS) ** 2),
    "over rows": lambda h: jnp.mean((jax.nn.log_softmax(h, 0) - TARGETS) ** 2),
}


@pytest.mark.parametrize("of", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_sends_its_gradient_to_the_bias_in_float32(name, of):
    loss = LOSSES[name]

    def of_layer(w, b):
        return loss(X @ w + b)

    gradients = jax.grad(jamp.autocast(of_layer, device_type="cpu"), argnums=(0, 1))
    _, found = of(gradients)(W, B)
    of_rows = jax.grad(loss)(X @ W + B)
    error = np.abs(found - of_rows.sum(0))
    assert (error <= 2e-5 * np.abs(of_rows).sum(0)).all()


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_a_gated_layer_has_its_gradient_taken_inside(activation):
    def loss(w, b):
        gate, up = jnp.split(X @ w + b, 2, axis=-1)
        return jnp.mean((activation(gate) * up - X[:, :8]) ** 2)

    w = RNG.normal(size=(32, 16)).astype("f") / 6
    both = jax.value_and_grad(loss, argnums=(0, 1))
    found = jamp.autocast(both, device_type="cpu")(w, np.zeros(16, "f"))
    expected = both(w, np.zeros(16, "f"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def test_a_layer_may_be_moved_ever_so_often_before_its_loss():
    def loss(w, b):
        layer = X @ w + b
        for _ in range(500):
            layer = layer.T.T
        return picked(layer)

    found = jax.eval_shape(jax.grad(jamp.autocast(loss, device_type="cpu"), 1), W, B)
    assert found.dtype == "float32"
