"""How often a program under autocast is traced and compiled."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)


def closes_over_arrays(program):
    consts = jax.make_jaxpr(program.fn)(*program.arguments()).consts
    return any(isinstance(const, jax.Array) for const in consts)


class Compilations:
    """Counts the programs that XLA compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **kwargs):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


@every_program
def test_a_program_is_traced_and_compiled_once_per_signature(program, compilations):
    calls = []

    def counted(*args):
        calls.append(1)
        return program.fn(*args)

    fn = gpu(counted)
    arguments, others = program.arguments(), program.arguments(1)
    first = fn(*arguments)
    before = compilations.count
    fn(*others)
    again = fn(*arguments)
    # Arrays that a program closes over may have changed, so it is traced anew.
    assert len(calls) == (3 if closes_over_arrays(program) else 1)
    assert compilations.count == before
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_an_eager_gradient_compiles_nothing_the_second_time(compilations):
    def loss(x):
        return jnp.sum(jax.nn.relu(jax.nn.softmax(x @ x)))

    gradient, x = jax.grad(gpu(loss)), jnp.ones((3, 3))
    gradient(x)
    before = compilations.count
    gradient(x)
    assert compilations.count == before


def test_the_counter_sees_a_compilation(compilations):
    before = compilations.count
    jax.jit(lambda x: x * 1.2345 + 6.789)(jnp.ones((3, 5, 7)))
    assert compilations.count > before


@pytest.mark.parametrize("change", ["shape", "dtype", "tree", "static"])
def test_another_signature_is_traced_anew(change):
    calls = []

    @gpu
    def fn(x, mode="add"):
        calls.append(mode)
        leaf = x["x"] if isinstance(x, dict) else x
        return leaf @ leaf if mode == "multiply" else leaf + leaf

    x = jnp.ones((2, 2))
    fn(x)
    other = {
        "shape": lambda: fn(jnp.ones((3, 3))),
        "dtype": lambda: fn(x.astype(jnp.float16)),
        "tree": lambda: fn({"x": x}),
        "static": lambda: fn(x, "multiply"),
    }[change]
    result = other()
    other()
    assert len(calls) == 2
    assert result.dtype == (jnp.float32 if change in ("shape", "tree") else jnp.float16)
    assert fn(x).dtype == jnp.float32


def test_a_static_argument_of_a_jit_is_not_kept_alive():
    """In a process of its own, whose other caches need not be made anew."""
    code = """if True:
        import gc, weakref
        import jax
        import jamp

        class Configuration:
            factor = 2.0

        fn = jamp.autocast(lambda x, config: x * config.factor)
        config = Configuration()
        seen = weakref.ref(config)
        jax.jit(fn, static_argnums=1)(1.0, config)
        del config
        jax.clear_caches()
        gc.collect()
        assert seen() is None
    """
    subprocess.run([sys.executable, "-c", code], check=True)
