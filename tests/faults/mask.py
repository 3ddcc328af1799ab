"""An additive mask of -1e9 that becomes -inf: a row that is all masked is NaN."""

import jax
import jax.numpy as jnp

from . import Fault, normal


def masked(scores, mask):
    return scores + mask  # FAULT


def attention(w, x, mask):
    q = x @ w
    scores = jnp.einsum("bqd,bkd->bqk", q, x)
    return jax.nn.softmax(masked(scores, mask)) @ x


def make():
    mask = normal(2, 8, 8, scale=0)
    mask[:, 6:] = -1e9
    mask[6:] = -1e9  # padding attends to nothing
    args = (normal(0, 16, 16, scale=0.1), normal(1, 2, 8, 16), mask)
    return Fault(attention, args, "overflow", "convert_element_type")
