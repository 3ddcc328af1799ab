"""A backward rule whose matmul leaves float16's range at every usable loss scale."""

import jax
import jax.numpy as jnp

from . import Fault, normal


@jax.custom_vjp
def project(x, w):
    return x @ w


def project_fwd(x, w):
    return x @ w, (x, w)


def project_bwd(saved, g):
    x, w = saved
    return (g * 3e4) @ (w @ w.T @ w).T * 1e-6, x.T @ g  # FAULT


project.defvjp(project_fwd, project_bwd)


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w1"])
    z = project(h, params["w2"])
    return jnp.mean((z @ params["w3"]) ** 2)


def make():
    params = {
        "w1": normal(0, 16, 32, scale=0.2),
        "w2": normal(1, 32, 32),
        "w3": normal(2, 32, 4, scale=0.2),
    }
    args = (params, normal(3, 24, 16))
    return Fault(loss_fn, args, "overflow", "dot_general", 16.0)
