"""Convolutions inside of `jax.shard_map`, which checks what varies over the mesh."""

import jax
import numpy as np
import pytest
from convolutions import CONVOLUTIONS, IN_PARTS, example
from jax import P
from jax.sharding import AxisType
from products import cast, integers

from jamp._lowerings import convolution, patches, slices


def with_gradients(fn):
    def computed(x, y, ct):
        result, pullback = jax.vjp(fn, x, y)
        return result, *pullback(ct.astype(result.dtype))

    return computed


def in_shards(fn, *specs):
    """On a mesh of one device: JAX checks there what it does on others."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    ins, outs = (*specs, P("i")), (P("i"), *specs)
    return jax.shard_map(with_gradients(fn), mesh=mesh, in_specs=ins, out_specs=outs)


def assert_equal_in_shards(fn, x, y):
    """Whether they equal those in float32, with pictures or weights that vary."""
    ct = jax.device_put(integers(2, jax.eval_shape(fn, x, y).shape))
    sharded = [
        in_shards(cast(fn), P("i"), P()),
        in_shards(cast(fn), P(), P("i")),
    ]
    # One program: to compile it takes less time than to compile several.
    expected, *found = jax.jit(
        lambda *args: [f(*args) for f in (with_gradients(fn), *sharded)]
    )(x, y, ct)
    for ours in found:
        for a, b in zip(ours, expected, strict=True):
            # What has 16 bits was rounded once.
            np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("amx")
def test_convolutions_of_every_kind(name, monkeypatch):
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 1)
    assert_equal_in_shards(*example(name))


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.usefixtures("amx")
def test_convolutions_in_parts(name, monkeypatch):
    monkeypatch.setattr(slices, "_MOST_BYTES_WITH_AMX", 64)
    monkeypatch.setattr(patches, "_LEAST_BYTES", 0)
    monkeypatch.setattr(convolution, "_LEAST_FEATURES", 1)
    assert_equal_in_shards(*example(name))
