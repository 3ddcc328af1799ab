"""How often a program under autocast is traced and compiled."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from programs import PROGRAMS

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)


def closes_over_arrays(program):
    consts = jax.make_jaxpr(program.fn)(*program.arguments()).consts
    return any(isinstance(const, jax.Array) for const in consts)


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


X = jnp.ones((3, 3))
W = jnp.full((3, 3), 0.5)


def relus(x):
    return jax.nn.relu(jax.nn.relu(x @ x) @ x)


@jax.custom_vjp
def with_rules(x):
    return jax.nn.relu(x @ x)


with_rules.defvjp(
    lambda x: (with_rules(x), x), lambda x, g: (jax.nn.relu(g @ x.T) + x.T @ g,)
)


def step(carry, x):
    return jax.nn.relu(carry @ carry) + x, carry[0]


jitted = jax.jit(relus)
with_a_cast = jax.jit(lambda x: (x @ x).astype(jnp.float32) @ x)
closing_over = jax.jit(lambda x: jax.nn.softmax(x @ W))
checkpointed = jax.checkpoint(relus)


@jax.jit
def of_float32(x):
    return jnp.sin(x @ x) * x


@jax.jit
def read_by_several(x):
    y = x @ x
    return jnp.sin(y) @ x + jnp.exp(y) @ x


MADE_ONCE = {
    "plain": lambda x: jax.nn.softmax(x @ x),
    "relu": relus,
    "custom_vjp": with_rules,
    "jit": jitted,
    "jit with a cast": with_a_cast,
    "jit that closes over arrays": closing_over,
    "jit beside what is closed over": lambda x: jitted(x) @ W,
    "jit of rules": jax.jit(lambda x: with_rules(with_rules(x))),
    "jit of a function in float32": of_float32,
    "jit of a value that several read": read_by_several,
    "checkpoint": checkpointed,
    "scan": lambda x: jax.lax.scan(step, x, jnp.stack([x, x]))[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] > 2, relus, jitted, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, relus, x),
}
TRANSFORMS = {
    "call": lambda fn: fn,
    "grad": lambda fn: jax.grad(lambda x: jnp.sum(fn(x), dtype=jnp.float32)),
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (x,)),
    "vmap": lambda fn: jax.vmap(fn, in_axes=None, axis_size=2),
}
REFUSED = {("while", "grad"), ("custom_vjp", "jvp"), ("jit of rules", "jvp")}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MADE_ONCE)
def test_an_eager_call_compiles_no_more_again_than_jax_does(
    name, transform, compilations
):
    """That is nothing of what is jitted, nor of a loop whose function is the same."""
    if (name, transform) in REFUSED:
        pytest.skip("JAX refuses it")
    compiled = []
    for fn in (MADE_ONCE[name], jamp.autocast(MADE_ONCE[name])):
        again = TRANSFORMS[transform](fn)
        again(X)
        before = compilations.count
        again(X)
        compiled.append(compilations.count - before)
    assert compiled[1] <= compiled[0]


def test_an_eager_gradient_compiles_nothing_the_second_time(compilations):
    def loss(x):
        return jnp.sum(jax.nn.relu(jax.nn.softmax(x @ x)))

    gradient = jax.grad(gpu(loss))
    gradient(X)
    before = compilations.count
    gradient(X)
    assert compilations.count == before


factor = 1.0


@jax.custom_vjp
def reading_a_number(x):
    return x @ x


reading_a_number.defvjp(
    lambda x: (reading_a_number(x), None), lambda _, g: (g * factor,)
)


def carried(x, _):
    return reading_a_number(x), None


@pytest.mark.parametrize(
    "fn",
    [
        reading_a_number,
        lambda x: jax.lax.scan(carried, x, length=1)[0],
        lambda x: jax.lax.cond(x[0, 0] > 2, jnp.negative, reading_a_number, x),
    ],
    ids=["call", "scan", "cond"],
)
def test_an_eager_gradient_asks_a_rule_for_what_it_reads_now(fn, monkeypatch):
    fn = jamp.autocast(fn)
    for number in (1.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "factor", number)
        gradient = jax.grad(lambda x: jnp.sum(fn(x), dtype=jnp.float32))(X)
        np.testing.assert_array_equal(gradient, jnp.full_like(X, number))


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
