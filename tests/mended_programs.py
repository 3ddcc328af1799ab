"""Programs that a rounding in front of readers in float32 would spoil."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from faults import normal


def batch_norm():
    """A variance as the difference of two large numbers."""

    def model(params, x):
        h = x @ params["w"] + params["b"]
        mean = jnp.mean(h, axis=0)
        variance = jnp.mean(h * h, axis=0) - mean * mean
        return (h - mean) / jnp.sqrt(variance + 1e-3)

    params = {"w": normal(0, 32, 32, scale=0.5), "b": 64 + normal(1, 32)}
    return model, params, normal(2, 256, 32)


def epsilon():
    """An epsilon that float16 rounds to zero, beside a row of zeros."""

    def model(params, x):
        h = x @ params["w"]
        safe = jnp.max(jnp.abs(h), axis=-1, keepdims=True) + params["eps"]
        return h / safe

    x = normal(1, 8, 32)
    x[3] = 0
    return model, {"w": normal(0, 32, 32), "eps": jnp.float32(1e-8)}, x


def mask():
    """An additive mask of -1e9, with rows that are all masked."""

    def attention(params, x):
        scores = jnp.einsum("bqd,bkd->bqk", x @ params["w"], x)
        return jax.nn.softmax(scores + params["mask"]) @ x

    mask = normal(2, 8, 8, scale=0)
    mask[:, 6:] = mask[6:] = -1e9
    params = {"w": normal(0, 16, 16, scale=0.1), "mask": mask}
    return attention, params, normal(1, 2, 8, 16)


def large_logits():
    """Cross entropy of logits in the thousands."""

    def loss_fn(params, x):
        logits = jnp.tanh(x @ params["w1"]) @ params["w2"] + params["b"]
        peak = jnp.max(logits, -1, keepdims=True)
        total = peak[:, 0] + jnp.log(jnp.sum(jnp.exp(logits - peak), -1))
        return jnp.mean(total - logits[:, 0])

    params = {
        "w1": normal(0, 16, 32),
        "w2": normal(1, 32, 10, scale=0.4),
        "b": 2000 + normal(2, 10, scale=0),
    }
    return loss_fn, params, normal(3, 32, 16)


def scan_drift():
    """Steps that are smaller than 16 bits can resolve."""

    def trajectory(params, x):
        def step(position, velocity):
            return position + 2e-4 * (velocity @ params["w"]), None

        return jax.lax.scan(step, params["x"] @ params["w"], x)[0]

    params = {"w": abs(normal(0, 16, 16)), "x": abs(normal(1, 4, 16))}
    return trajectory, params, abs(normal(2, 500, 4, 16))


def sum_of_squares():
    """An energy of values above 255."""

    def energy(params, x):
        h = x @ params["w"]
        return jnp.sum(h * h) / x.size

    return energy, {"w": normal(0, 64, 64, scale=20)}, normal(1, 32, 64)


def switch_branch():
    """A cube, divided by a number that float16 cannot hold."""

    def model(params, x):
        branches = [jnp.tanh, jax.nn.relu, lambda h: h * h * h / 1e6]
        return jax.lax.switch(2, branches, x @ params["w"]) @ params["w"].T

    return model, {"w": normal(0, 32, 16, scale=5)}, normal(1, 8, 32, scale=2)


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        gated = nn.Dense(32)(400 * x) * nn.Dense(32)(400 * x)
        return nn.Dense(4)(x + nn.LayerNorm()(gated))


def gate():
    """A product of two large activations in front of a norm."""
    x = normal(0, 8, 32)
    return Gated().apply, Gated().init(jax.random.key(0), x), x


PROGRAMS = (
    batch_norm,
    epsilon,
    mask,
    large_logits,
    scan_drift,
    sum_of_squares,
    switch_branch,
    gate,
)
