"""Mamba in plain JAX: selective state spaces, scanned in parallel (Gu and Dao 2023)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._task import Task, sentences

VOCABULARY, LENGTH, DIM, DEPTH = 48, 32, 32, 1
INNER, STATE, RANK, WIDTH = 2 * DIM, 8, 4, 4


def init(rng):
    def normal(*shape, fan_in):
        values = rng.standard_normal(shape) / np.sqrt(fan_in)
        return jnp.asarray(values, jnp.float32)

    def layer():
        # softplus(dt_bias) is a step size between 0.001 and 0.1, evenly in its log.
        steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), INNER))
        return {
            "norm": jnp.ones(DIM),
            "in_proj": normal(DIM, 2 * INNER, fan_in=DIM),
            "conv": normal(WIDTH, 1, INNER, fan_in=WIDTH),
            "conv_bias": jnp.zeros(INNER),
            "x_proj": normal(INNER, RANK + 2 * STATE, fan_in=INNER),
            "dt_proj": normal(RANK, INNER, fan_in=RANK),
            "dt_bias": jnp.asarray(np.log(np.expm1(steps)), jnp.float32),
            "A_log": jnp.log(jnp.tile(jnp.arange(1.0, STATE + 1), (INNER, 1))),
            "D": jnp.ones(INNER),
            "out_proj": normal(INNER, DIM, fan_in=INNER * DEPTH),
        }

    return {
        "embedding": 0.02 * normal(VOCABULARY, DIM, fan_in=1),
        "layers": [layer() for _ in range(DEPTH)],
        "norm": jnp.ones(DIM),
    }


def rms_norm(scale, x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def causal_conv(p, x):
    y = lax.conv_general_dilated(
        x,
        p["conv"],
        (1,),
        [(WIDTH - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=INNER,
    )
    return y + p["conv_bias"]


def selective_scan(x, dt, a, b, c):
    decay = jnp.exp(dt[..., None] * a)
    inputs = (dt * x)[..., None] * b[:, :, None, :]

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, states = lax.associative_scan(combine, (decay, inputs), axis=1)
    return jnp.einsum("bldn,bln->bld", states, c)


def mixer(p, x):
    x, gate = jnp.split(x @ p["in_proj"], 2, axis=-1)
    x = jax.nn.silu(causal_conv(p, x))
    dt, b, c = jnp.split(x @ p["x_proj"], [RANK, RANK + STATE], axis=-1)
    dt = jax.nn.softplus(dt @ p["dt_proj"] + p["dt_bias"])
    y = selective_scan(x, dt, -jnp.exp(p["A_log"]), b, c) + p["D"] * x
    return (y * jax.nn.silu(gate)) @ p["out_proj"]


def loss_fn(params, state, tokens):
    x = params["embedding"][tokens[:, :-1]]
    for p in params["layers"]:
        x = x + mixer(p, rms_norm(p["norm"], x))
    logits = rms_norm(params["norm"], x) @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), state


def make_task() -> Task:
    """The next token of a Markov chain, by AdamW."""
    rng = np.random.default_rng(3)
    batches = sentences(rng, VOCABULARY, LENGTH + 1, 4)
    optimizer = optax.adamw(1e-2, b2=0.95, weight_decay=0.1)
    return Task(loss_fn, init(rng), None, batches, optimizer)
