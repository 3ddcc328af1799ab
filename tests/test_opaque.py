"""What autocast does not look into runs as traced, amid what it rewrites."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback, sparse

import jamp

X = jnp.arange(16.0).reshape(4, 4) / 16
IDENTITY = sparse.BCOO.fromdense(jnp.eye(4))
SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def printed(x):
    jax.debug.print("corner {corner}", corner=(x @ x)[0, 0])
    return x @ x


def called_back(x):
    return jax.pure_callback(lambda a: np.asarray(a) * 2, SHAPE, x @ x)


def called_back_with_effects(x):
    return io_callback(lambda a: np.asarray(a) + 1, SHAPE, x @ x)


def through_a_reference(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ x
    return ref[...]


def solved(x):
    return jnp.linalg.solve(x + 4 * jnp.eye(4), x) @ x


PROGRAMS = {
    "debug_print": printed,
    "pure_callback": called_back,
    "io_callback": called_back_with_effects,
    "reference": through_a_reference,
    "fft": lambda x: jnp.fft.fft(x @ x).real,
    "solve": solved,
    "random": lambda x: jax.random.normal(jax.random.key(0), (4, 4)) @ x,
    "sparse": lambda x: IDENTITY @ x,
    "complex": lambda x: jnp.abs((x @ x) * 1j),
}


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_program_with_something_opaque_runs(name, device, outside):
    fn = PROGRAMS[name]
    result = outside(jamp.autocast(fn, device_type=device))(X)
    jax.effects_barrier()
    np.testing.assert_allclose(result.astype(jnp.float32), fn(X), rtol=0.05, atol=0.05)


def test_a_callback_gets_the_dtype_that_it_was_written_for():
    seen = []

    def fn(x):
        callback = lambda a: seen.append(a.dtype) or np.asarray(a)  # noqa: E731
        return jax.pure_callback(callback, SHAPE, x @ x)

    jamp.autocast(fn, device_type="gpu")(X)
    assert set(seen) == {np.dtype(np.float32)}


def test_a_program_of_symbolic_shapes_is_exported():
    fn = jax.jit(jamp.autocast(lambda x: jnp.tanh(x @ x.T), device_type="gpu"))
    rows = export.symbolic_shape("rows, 4")
    exported = export.export(fn)(jax.ShapeDtypeStruct(rows, jnp.float32))
    assert exported.out_avals[0].dtype == jnp.float16
    np.testing.assert_allclose(exported.call(X), jnp.tanh(X @ X.T), rtol=5e-3)
