"""A product in the diagnosed function itself, where no smaller rule reaches."""

import jax.numpy as jnp

import jamp

from . import Fault, normal


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w1"])
    h = jnp.tanh(h @ params["w2"])
    power = (x @ params["w1"]) @ (params["w1"].T @ x.T)  # FAULT
    return jnp.mean(h) + 1e-6 * jnp.mean(power)


def repaired(params, x):
    h = jnp.tanh(x @ params["w1"])
    h = jnp.tanh(h @ params["w2"])
    with jamp.autocast(enabled=False):
        power = (x @ params["w1"]) @ (params["w1"].T @ x.T)
    return jnp.mean(h) + 1e-6 * jnp.mean(power)


def make():
    params = {"w1": normal(0, 32, 32, scale=9), "w2": normal(1, 32, 32)}
    args = (params, normal(2, 64, 32))
    return Fault(loss_fn, args, "overflow", "dot_general", repaired=repaired)
