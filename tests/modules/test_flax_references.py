"""Modules of flax.nnx whose variables are references of JAX, by `ref=True`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import each_device
from flax import nnx

import jamp

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.outer = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


def of_references():
    with nnx.var_defaults(ref=True):
        return Model()


def in_a_scan(model, x):
    return jax.lax.scan(lambda y, _: (model(y), None), x, length=2)[0]


WAYS = {
    "call": lambda model, x: model(x),
    "nnx.jit": nnx.jit(lambda model, x: model(x)),
    "jax.jit": jax.jit(lambda model, x: model(x)),
    "nnx.remat": lambda model, x: nnx.remat(lambda model, x: model(x))(model, x),
    "scan": in_a_scan,
    "fori_loop": lambda model, x: jax.lax.fori_loop(0, 2, lambda _, y: model(y), x),
}


@each_device
@pytest.mark.parametrize("way", WAYS)
def test_they_compute_in_16_bits_and_keep_their_state(way, device):
    fn, plain, cast = WAYS[way], of_references(), of_references()
    expected = fn(plain, X)
    actual = jamp.autocast(fn, device_type=device)(cast, X)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=0.05, atol=0.05
    )
    mean, moved = cast.norm.mean[...], plain.norm.mean[...]
    assert mean.dtype == jnp.float32
    # Flax itself keeps no statistics of a rematerialized module.
    assert jnp.any(moved != 0) == (way != "nnx.remat")
    np.testing.assert_allclose(mean, moved, rtol=0.02, atol=0.005)
    report = jamp.explain(fn, device_type=device)(of_references(), X)
    assert report.low_flop_share == 1
