"""Checkpoints are the same whatever primitive JAX makes of them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxprs import text

import jamp

W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32) / 2


@contextlib.contextmanager
def remat3(value):
    """A setting of JAX that makes another primitive of `jax.checkpoint`."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", value)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def whole(w):
    return jnp.sum(jax.checkpoint(lambda w: jax.nn.softmax(jnp.tanh(w @ w)) @ w)(w))


def keeping_names(w):
    save = jax.checkpoint_policies.save_only_these_names("kept")
    layer = lambda w: jnp.sin(checkpoint_name(jnp.tanh(w @ w), "kept") @ w)  # noqa: E731
    return jnp.sum(jax.checkpoint(layer, policy=save)(w))


def in_a_loop(w):
    layer = jax.checkpoint(lambda x, _: (jax.nn.softmax(x @ w), None))
    return jnp.sum(jax.lax.scan(layer, w, None, length=3)[0][0])


def casting(w):
    layer = jax.checkpoint(lambda w: jnp.sin((w @ w).astype(jnp.float32)))
    return jnp.sum(layer(w))


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x)


@with_rule.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.sin(x), jnp.cos(x) * jax.nn.softmax(x) * dx


def float32_in_a_rule(w):
    return jnp.sum(with_rule(w @ w))


PROGRAMS = [whole, keeping_names, in_a_loop, casting, float32_in_a_rule]


@each_device
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gradient_is_the_same_program(program, device):
    texts = []
    for value in (False, True):
        with remat3(value):
            fn = jamp.autocast(program, device_type=device)
            texts.append(text(jax.grad(fn), W))
    assert texts[0] == texts[1]
    assert "checkpoint[" in texts[0] or "remat2[" in texts[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gradient_taken_inside_is_right_and_recomputes(program):
    gradient = jax.grad(program)
    with remat3(True):
        fn = jamp.autocast(gradient, device_type="gpu")
        found, written = jax.jit(fn)(W), text(fn, W)
    np.testing.assert_allclose(found, gradient(W), rtol=0.02, atol=0.02)
    assert "checkpoint[" in written or "remat2[" in written


@each_device
def test_what_a_policy_saves_keeps_its_dtype(device):
    save = jax.checkpoint_policies.dots_saveable

    def layer(w):
        product = w @ w
        return jnp.sum(jnp.sin(product)), product

    fn = jax.checkpoint(layer, policy=save)
    gradient = jax.grad(fn, has_aux=True)
    _, product = jax.jit(jamp.autocast(gradient, device_type=device))(W)
    assert product.dtype == LOW[device]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="it needs JAX 0.12")
def test_a_checkpoint_of_references_is_differentiated_as_jax_does():
    def summed(total, w):
        total[...] = w @ w
        return jnp.sum(total[...])

    def fn(w):
        return jax.checkpoint(summed)(jax.new_ref(jnp.zeros_like(w)), w)

    with remat3(True):
        found = jax.grad(jamp.autocast(fn, device_type="gpu"))(W)
        np.testing.assert_allclose(found, jax.grad(fn)(W), rtol=0.02, atol=0.02)


def test_an_answer_of_a_policy_that_jax_refuses_is_refused():
    def saves(primitive, *_, **__):
        return np.bool_(True) if primitive is lax.dot_general_p else False

    def fn(w):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(w @ w), policy=saves)(w))

    for gradient in (jax.grad(fn), jax.grad(jamp.autocast(fn))):
        with pytest.raises(TypeError, match="should be a bool"):
            gradient(W)
