"""Functions that change the structure of a module, and what compares the results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
# `nnx.capture` is what Flax would rather see.
MAY_SOW = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

X = jax.random.normal(jax.random.key(1), (8, 4))


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))
        self.count = 0

    def __call__(self, x):
        return self.dropout(self.second(self.first(x)))


def same_state(module, expected):
    """Whether modules have one structure and, but for rounding, the same arrays."""
    assert nnx.graphdef(module) == nnx.graphdef(expected)
    leaves = (jax.tree.leaves(nnx.state(m)) for m in (module, expected))
    for actual, wanted in zip(*leaves, strict=True):
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            actual, wanted = map(jax.random.key_data, (actual, wanted))
        np.testing.assert_allclose(
            actual.astype(wanted.dtype), wanted, rtol=0.02, atol=0.02
        )


def counted(model, x):
    model.count += 1
    return model(x)


def in_eval_mode(model, x):
    model.eval()
    return model(x)


def of_another_kind(model, x):
    model.first = model.dropout
    return model(x)


def with_a_cache(model, x):
    y = model.first(x)
    model.cache = nnx.Cache(y)
    return y


def sowing(model, x):
    y = model.first(x)
    model.sow(nnx.Intermediate, "hidden", y)
    return y


def with_a_lazy_layer(model, x):
    if not hasattr(model, "lazy"):
        model.lazy = nnx.Linear(4, 4, rngs=nnx.Rngs(3))
    return model.lazy(model(x))


def with_layers_in_containers(model, x):
    model.layers = nnx.List([model.first])
    model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(3)))
    model.named = nnx.Dict(second=model.second)
    return model.layers[1](x)


def swapped(model, x):
    model.first, model.second = model.second, model.first
    return model(x)


def tied(model, x):
    model.second = model.first
    return model(x)


def in_a_cycle(model, x):
    model.me = model
    return model.me(x)


def with_other_variables(model, x):
    model.first.kernel = nnx.Param(model.first.kernel[...] * 2)
    return model.first(x)


def mean(fn):
    return lambda model, x: jnp.mean(fn(model, x).astype(jnp.float32))
