"""Checkpoints with every kind of policy, and calls of functions inside functions."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import closed_call_p

from ._construct import Construct, normal

policies = jax.checkpoint_policies

POLICIES = {
    "dots_saveable": policies.dots_saveable,
    "dots_without_batch_dimensions": policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "everything_saveable": policies.everything_saveable,
    "these_names": policies.save_only_these_names("product"),
    "all_but_these_names": policies.save_anything_except_these_names("product"),
    "any_names_but_these": policies.save_any_names_but_these("product"),
    "of_both_policies": policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("hidden")
    ),
    "names_offloaded": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def block(x, w):
    product = checkpoint_name(x @ w, "product")
    hidden = checkpoint_name(jnp.tanh(product), "hidden")
    return jnp.sin(hidden @ w)


def layers(x, w):
    for _ in range(2):
        x = jax.checkpoint(block)(x, w)
    return x


def nested(x, w):
    inner = jax.checkpoint(lambda c: jnp.tanh(c @ w), policy=policies.dots_saveable)
    return jax.checkpoint(lambda c: inner(inner(c)) @ w)(x)


def with_static_arguments(x, w):
    def fn(x, power, w, activation):
        return activation(x @ w) ** power

    return jax.checkpoint(fn, static_argnums=(1, 3))(x, 2, w, jnp.tanh)


def with_all_kinds_of_values(x, w):
    def fn(arguments, n, nothing):
        hidden = jnp.tanh(arguments["x"] @ arguments["w"]) * n
        return {"hidden": hidden, "n": n + 1, "positive": hidden > 0}, nothing

    return jax.checkpoint(fn)({"x": x, "w": w}, jnp.int32(1), None)


def over_layers(x, w):
    step = jax.checkpoint(block, policy=policies.save_only_these_names("product"))
    return lax.scan(lambda c, w: (step(c, w), None), x, jnp.stack([w, w.T]))[0]


def in_scan(x, w):
    step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
    return lax.scan(step, x, None, length=3)[0]


def in_cond(x, w):
    branch = jax.checkpoint(lambda x: jnp.tanh(x @ w))
    return lax.cond(x.sum() > 0, branch, jax.checkpoint(lambda x: x @ w.T), x)


def around_scan(x, w):
    def fn(x):
        step = lambda c, row: (jnp.tanh(c @ w) + row, row @ w)  # noqa: E731
        return lax.scan(step, x, x)

    return jax.checkpoint(fn)(x)


def around_attention(x, w):
    def attention(x):
        query, key, value = x @ w, x @ w.T, jnp.tanh(x)
        return jax.nn.softmax(query @ key.T / 2) @ value

    return jax.checkpoint(attention, policy=policies.dots_saveable)(x)


@jax.custom_vjp
def clipped(x, w):
    return jnp.tanh(x @ w)


def _clipped_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _clipped_backward(residuals, g):
    x, w, y = residuals
    g = jnp.clip(g, -0.5, 0.5) * (1 - y * y)
    return g @ w.T, x.T @ g


clipped.defvjp(_clipped_forward, _clipped_backward)


def around_a_custom_vjp(x, w):
    return jax.checkpoint(lambda x: clipped(clipped(x, w), w))(x)


def residual_of_convolutions(image, kernel):
    def fn(image):
        image = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(image)

    remat = jax.checkpoint(fn, policy=policies.nothing_saveable)
    return image + remat(remat(image))


@functools.partial(jax.jit, static_argnums=(2,), static_argnames=("power",))
def static(x, w, activation, *, power):
    return activation(x @ w) ** power


@functools.partial(jax.jit, inline=True)
def inlined(x, w):
    return jnp.tanh(x @ w)


@functools.partial(jax.jit, donate_argnums=0)
def donated(x, w):
    return jnp.tanh(x @ w)


@jax.jit
def helper(x, w):
    return jnp.tanh(x @ w)


@jax.jit
def of_a_pytree(arguments, n):
    hidden = helper(arguments["x"], arguments["w"])
    return {"hidden": hidden, "n": n, "nothing": None}


def named(x, w):
    inner = jax.named_call(lambda x: jnp.tanh(x @ w), name="inner")
    with jax.named_scope("outer"):
        return inner(x) @ w


def called_closed(x, w):
    program = jax.make_jaxpr(lambda x, w: (jnp.tanh(x @ w),))(x, w)
    params = closed_call_p.get_bind_params({"call_jaxpr": program})
    (hidden,) = closed_call_p.bind(x, w, **params)
    return hidden @ w


def image_and_kernel():
    return normal(1, 4, 4, 2), normal(3, 3, 2, 2, seed=1, scale=0.3)


CONSTRUCTS = (
    Construct("checkpoint_layers", layers),
    Construct("checkpoint_nested", nested),
    Construct(
        "checkpoint_without_prevent_cse", jax.checkpoint(block, prevent_cse=False)
    ),
    *(
        Construct(f"checkpoint_{name}", jax.checkpoint(block, policy=policy))
        for name, policy in POLICIES.items()
    ),
    Construct("checkpoint_with_static_arguments", with_static_arguments),
    Construct("checkpoint_with_all_kinds_of_values", with_all_kinds_of_values),
    Construct("checkpoint_in_scan", in_scan),
    Construct("checkpoint_over_layers", over_layers),
    Construct("checkpoint_in_cond", in_cond),
    Construct("checkpoint_around_scan", around_scan),
    Construct("checkpoint_around_attention", around_attention),
    Construct("checkpoint_around_a_custom_vjp", around_a_custom_vjp),
    Construct("checkpoint_of_convolutions", residual_of_convolutions, image_and_kernel),
    Construct(
        "jit_with_static_arguments", lambda x, w: static(x, w, jnp.tanh, power=2)
    ),
    Construct("jit_inlined", lambda x, w: inlined(inlined(x, w), w)),
    Construct("jit_with_donation", lambda x, w: donated(x * 2, w)),
    Construct(
        "jit_called_twice", lambda x, w: helper(helper(x, w), w) + helper(x[:2], w)[0]
    ),
    Construct("jit_in_jit", lambda x, w: of_a_pytree({"x": x, "w": w}, jnp.int32(3))),
    Construct("named_call", named),
    Construct("closed_call", called_closed),
)
