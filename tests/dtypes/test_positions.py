"""Products that add nothing up, and tables of positions: as exact as in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW, each_device
from jaxprs import matmul_dtypes, traced

import jamp

LENGTH, WIDTH = 2048, 8
FREQUENCIES = np.float32(10_000.0) ** (-np.arange(WIDTH, dtype=np.float32) / WIDTH)


ANGLES = {
    "einsum": lambda t, f: jnp.einsum("i,j->ij", t, f),
    "outer": jnp.outer,
    "unit dimension": lambda t, f: t[:, None] @ f[None],
    "tensordot": lambda t, f: jnp.tensordot(t, f, axes=0),
    "dot_general": lambda t, f: jax.lax.dot_general(t, f, (((), ()), ((), ()))),
    "convolution": lambda t, f: (
        jax.lax.conv_general_dilated(t[None, None], f[:, None, None], (1,), "VALID")[
            0
        ].T
    ),
}


def positions():
    return jnp.arange(LENGTH, dtype=jnp.float32)


def made_inside(angles):
    return lambda *_: angles(
        positions(), 10_000.0 ** (-jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH)
    )


SOURCES = {
    "iota": made_inside,
    "closed over": lambda angles: (
        lambda *_: angles(np.arange(2048.0, dtype="f"), FREQUENCIES)
    ),
    "handed in": lambda angles: angles,
    "in a jit": lambda angles: jax.jit(made_inside(jax.jit(angles))),
}


@each_device
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("angles", ANGLES)
def test_angles_of_positions_are_as_in_float32(angles, source, device):
    def table(*arrays):
        found = SOURCES[source](ANGLES[angles])(*arrays)
        return jnp.stack([jnp.cos(found), jnp.sin(found)])

    arrays = positions(), jnp.asarray(FREQUENCIES)
    found = jax.jit(jamp.autocast(table, device_type=device))(*arrays)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.jit(table)(*arrays))


@each_device
def test_a_table_of_iota_and_literals_through_a_matmul_is_as_in_float32(device):
    def table(_):
        t = positions()
        split = jnp.stack([jnp.floor(t / 64) * 64, t % 64], -1)
        return split @ jnp.full((2, 3), 0.5)

    found = jamp.autocast(table, device_type=device)(jnp.ones(3))
    np.testing.assert_array_equal(found[:, 1], np.arange(LENGTH) / 2)
    report = jamp.explain(table, device_type=device)(jnp.ones(3))
    assert "iota and literals alone" in str(report)


@each_device
def test_a_table_meets_data_in_16_bits_where_they_are_multiplied(device):
    def fn(x, w):
        return (x + positions()[:4]) @ w, positions().reshape(-1, 4) @ w

    low = LOW[device].dtype.name
    found = traced(jamp.autocast(fn, device_type=device), jnp.ones((3, 4)), jnp.eye(4))
    assert matmul_dtypes(found) == [(low, low)] * 2


@each_device
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_a_model_whose_weights_are_closed_over_is_lowered(make, device):
    first, second = make(np.eye(4, dtype="f")), make(np.ones((4, 2), "f"))
    fn = jamp.autocast(lambda x: jnp.tanh(x @ first) @ second, device_type=device)
    low = LOW[device].dtype.name
    assert matmul_dtypes(traced(fn, jnp.ones((3, 4)))) == [(low, low)] * 2
    alone = jamp.autocast(lambda: jnp.matmul(first, second), device_type=device)
    assert matmul_dtypes(traced(alone)) == [(low, low)]


@each_device
def test_random_numbers_are_data(device):
    def fn():
        x = jax.random.normal(jax.random.key(0), (4, 4))
        return x @ x

    low = LOW[device].dtype.name
    assert matmul_dtypes(traced(jamp.autocast(fn, device_type=device))) == [(low, low)]


@each_device
def test_a_product_that_adds_nothing_up_promotes(device):
    def fn(x, w):
        h = x @ w
        outer = functools.partial(jnp.einsum, "i,j->ij")
        return outer(h[0], h[1]), outer(h[0], x[0])

    fn = jamp.autocast(fn, device_type=device)
    low, x = LOW[device].dtype.name, jnp.ones((4, 4))
    assert [r.dtype.name for r in fn(x, x)] == [low, "float32"]
    report = jamp.explain(fn)(x, x)
    assert "adds nothing up is elementwise" in str(report)
    assert len(report.matmuls) == 1


@each_device
def test_a_product_of_integers_that_16_bits_would_round_promotes(device):
    def fn(x, w):
        places = jnp.arange(len(x)) + 1000
        return places @ x, places @ (x @ w), jnp.ones(len(x), jnp.int8) @ x

    fn = jamp.autocast(fn, device_type=device)
    low, x = LOW[device].dtype.name, jnp.linspace(1, 2, 16).reshape(4, 4)
    found = fn(x, x)
    assert [r.dtype.name for r in found] == ["float32", low, low]
    expected = np.arange(1000, 1004) @ np.asarray(x)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    assert "integers that 16 bits would round" in str(jamp.explain(fn)(x, x))
