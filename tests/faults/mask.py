"""An additive mask of blocks that a matmul expands: its -1e9 becomes -inf."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def expanded(mask, blocks):
    return blocks.T @ (mask @ blocks)  # FAULT


def attention(w, x, mask, blocks):
    q = x @ w
    scores = jnp.einsum("bqd,bkd->bqk", q, x)
    return jax.nn.softmax(scores + expanded(mask, blocks)) @ x


def make():
    mask = normal(2, 4, 4, scale=0)
    mask[:, 3] = -1e9
    blocks = jnp.repeat(jnp.eye(4), 2, axis=1)
    args = (normal(0, 16, 16, scale=0.1), normal(1, 2, 8, 16), mask, blocks)
    return Fault(attention, args, "overflow", "convert_element_type")
