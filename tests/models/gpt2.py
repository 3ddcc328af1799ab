"""GPT-2 in plain JAX: learned positions and a head tied to the embedding (2019)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._task import Task, sentences

VOCABULARY, LENGTH, DIM, HEADS, DEPTH = 64, 32, 64, 4, 2


def init(rng):
    def normal(*shape, scale=0.02):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    def linear(inputs, outputs, scale=0.02):
        return {"w": normal(inputs, outputs, scale=scale), "b": jnp.zeros(outputs)}

    def norm():
        return {"g": jnp.ones(DIM), "b": jnp.zeros(DIM)}

    # What goes into the residual stream starts smaller the more blocks there are.
    small = 0.02 / np.sqrt(2 * DEPTH)
    return {
        "wte": normal(VOCABULARY, DIM),
        "wpe": normal(LENGTH, DIM, scale=0.01),
        "blocks": [
            {
                "ln_1": norm(),
                "qkv": linear(DIM, 3 * DIM),
                "proj": linear(DIM, DIM, small),
                "ln_2": norm(),
                "up": linear(DIM, 4 * DIM),
                "down": linear(4 * DIM, DIM, small),
            }
            for _ in range(DEPTH)
        ],
        "ln_f": norm(),
    }


def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["g"] + p["b"]


def linear(p, x):
    return x @ p["w"] + p["b"]


def attention(p, x):
    batch, length, dim = x.shape
    qkv = linear(p["qkv"], x).reshape(batch, length, 3, HEADS, dim // HEADS)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(dim // HEADS)
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    mixed = jax.nn.softmax(scores, axis=-1) @ v
    return linear(p["proj"], mixed.swapaxes(1, 2).reshape(batch, length, dim))


def forward(params, tokens):
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        x = x + attention(p, layer_norm(p["ln_1"], x))
        y = linear(p["up"], layer_norm(p["ln_2"], x))
        x = x + linear(p["down"], jax.nn.gelu(y, approximate=True))
    return layer_norm(params["ln_f"], x) @ params["wte"].T


def loss_fn(params, state, tokens):
    logits = forward(params, tokens[:, :-1])
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    return -picked.mean(), state


def make_task() -> Task:
    """The next token of a Markov chain, by AdamW with warmup and clipped gradients."""
    rng = np.random.default_rng(2)
    batches = sentences(rng, VOCABULARY, LENGTH + 1, 8)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.0, 5e-3, 5), b2=0.95, weight_decay=0.1),
    )
    return Task(loss_fn, init(rng), None, batches, optimizer)
