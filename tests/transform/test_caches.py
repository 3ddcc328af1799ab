"""What is kept between calls: never a stale result, nothing of the user's, bounded."""

import asyncio
import functools
import gc
import importlib
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import jamp
from jamp._emit import recurring

X = jax.device_put(np.arange(1, 5, dtype=np.float32))
W = jax.device_put(np.eye(4, dtype=np.float32))


class Held:
    """What a function closes over, and a caller changes."""

    def __init__(self):
        self.array = jnp.full(4, 2.0)
        self.scalar = jnp.float32(2.0)
        self.number = 2.0

    def change(self):
        self.array, self.scalar, self.number = self.array * 5, self.scalar * 5, 10.0


def in_jit(held, name):
    return lambda x: jax.jit(lambda y: y * getattr(held, name))(x)


def in_scan(held, name):
    def fn(x):
        body = jax.jit(lambda carry: carry * getattr(held, name))
        return jax.lax.scan(lambda c, _: (body(c), None), x, length=1)[0]

    return fn


def in_jit_of_grad(held, name):
    scaled = lambda x: (x * getattr(held, name) * x / 2).sum()  # noqa: E731
    return lambda x: jax.jit(jax.grad(scaled))(x)


def in_cond(held, name):
    return lambda x: jax.lax.cond(
        x[0] > 0, jax.jit(lambda y: y * getattr(held, name)), lambda y: y, x
    )


@pytest.mark.parametrize("name", ["array", "scalar"])
@pytest.mark.parametrize("inside", [in_jit, in_scan, in_jit_of_grad, in_cond])
def test_a_changed_array_that_an_inner_function_closes_over_is_seen(inside, name):
    held = Held()
    fn = jamp.autocast(inside(held, name))
    np.testing.assert_array_equal(fn(X), X * 2)
    held.change()
    np.testing.assert_array_equal(fn(X), X * 10)


@pytest.mark.parametrize("hold", [lambda fn, w: lambda x: fn(w, x), functools.partial])
def test_a_numpy_array_that_is_closed_over_stays_as_it_was_traced(hold):
    w = np.ones(4, np.float32)
    fn = jamp.autocast(hold(lambda w, x: x * w / w.sum(), w))
    np.testing.assert_array_equal(fn(X), X / 4)
    w[:] = 10
    np.testing.assert_array_equal(fn(X), X / 4)


def value_of_gradient(fn):
    return lambda x: jax.value_and_grad(lambda x: fn(x)[1])(x)[0] / x[1] * x


@pytest.mark.parametrize("name", ["array", "scalar", "number"])
@pytest.mark.parametrize(
    "transform", [lambda fn: jax.jit(lambda x: fn(x)), value_of_gradient]
)
def test_what_traces_anew_sees_what_a_function_closes_over_now(transform, name):
    held = Held()
    fn = jamp.autocast(lambda x: x * getattr(held, name))
    np.testing.assert_array_equal(transform(fn)(X), X * 2)
    held.change()
    np.testing.assert_array_equal(transform(fn)(X), X * 10)


@jax.custom_vjp
def with_rule(x):
    return jnp.sin(x)


with_rule.defvjp(lambda x: (with_rule(x), x), lambda x, g: (g * jax.nn.relu(x),))


def rule_beside_a_jit(weights, x):
    rule = jax.custom_vjp(lambda x: jnp.sin(x @ weights))
    rule.defvjp(lambda x: (rule(x), x), lambda x, g: (g @ weights,))
    return rule(kept(x))


kept = jax.jit(lambda x: with_rule(jax.nn.relu(x)))


@pytest.mark.parametrize(
    "transform",
    [
        lambda fn: jamp.autocast(fn),
        lambda fn: jax.jit(jamp.autocast(fn)),
        lambda fn: jax.grad(jamp.autocast(fn)),
        lambda fn: jax.jit(jax.grad(jamp.autocast(fn))),
        lambda fn: jax.grad(jax.jit(jamp.autocast(fn))),
        lambda fn: jax.jit(jamp.autocast(jax.grad(fn))),
    ],
    ids=["eager", "jit", "grad", "grad in jit", "grad of jit", "grad inside"],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda weights, x: jax.nn.softmax(jax.nn.standardize(x @ weights)),
        lambda weights, x: jax.jit(lambda y: jax.nn.softmax(y @ weights))(x),
        lambda weights, x: jax.nn.relu(jnp.sin(x) @ weights),
        lambda weights, x: with_rule(jnp.sin(x) @ weights),
        rule_beside_a_jit,
        lambda weights, x: jax.checkpoint(lambda y: jax.nn.relu(y @ weights))(x),
        lambda weights, x: jax.lax.scan(
            lambda y, _: (jax.nn.relu(y @ weights), y), x, length=2
        )[0],
        lambda weights, x: jax.lax.scan(
            lambda y, z: (jnp.tanh(y @ weights + z @ weights), y), x, x[None]
        )[0],
    ],
    ids="float32 jit custom_jvp custom_vjp rules checkpoint scan recurrent".split(),
)
def test_arrays_that_a_function_closes_over_are_not_kept_alive(
    function, transform, earlier_objects_left_alone
):
    def run():
        weights = jax.random.normal(jax.random.key(0), (4, 4))
        fn = transform(lambda x: jnp.sum(function(weights, x), dtype=jnp.float32))
        fn(X)
        return weakref.ref(weights)

    seen = run()
    # JAX's caches let go of what belongs to a function once that has gone.
    for _ in range(3):
        gc.collect()
    assert seen() is None


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.grad])
def test_an_array_that_is_read_no_more_is_let_go_of_while_a_call_runs(transform):
    constant = jnp.ones((64, 64))  # with it, a call runs op by op
    held = []

    def look():
        held.append(sum(a.shape == constant.shape for a in jax.live_arrays()))

    def fn(x):
        for _ in range(20):
            x = x + constant
        jax.debug.callback(look)
        return jnp.sum(x @ x)

    look()
    transform(jamp.autocast(fn))(jnp.ones((64, 64)))
    jax.effects_barrier()
    before, during = held
    assert during - before < 5


def test_a_function_that_was_not_called_goes_with_its_last_name():
    """As with jax.jit, before Python looks for cycles."""

    def scaled(weights):
        return jamp.autocast(lambda x: x @ weights)

    weights = jax.random.normal(jax.random.key(0), (4, 4))
    seen, fn = weakref.ref(weights), scaled(weights)
    gc.disable()
    try:
        del weights, fn
        assert seen() is None
    finally:
        gc.enable()


def test_an_eager_function_keeps_the_programs_that_were_used_last():
    traces = []

    def scaled(x, name):
        traces.append(name)
        return x * len(name)

    fn = jamp.autocast(scaled)
    names = ["n" * count for count in range(1, 202)]
    for name in names:
        fn(X, "kept")
        fn(X, name)
    assert traces.count("kept") == 1
    fn(X, names[-1])
    assert traces.count(names[-1]) == 1
    fn(X, names[0])
    assert traces.count(names[0]) == 2


def test_a_reloaded_module_keeps_its_rules(tmp_path, monkeypatch):
    (tmp_path / "reloaded.py").write_text("def doubled(x):\n    return x + x\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded")
    try:
        policy = jamp.Policy.load("cpu").with_rules(float32=["reloaded.doubled"])
        fn = lambda x: module.doubled(x @ W)  # noqa: E731
        assert jamp.autocast(fn, policy=policy)(X).dtype == jnp.float32
        importlib.reload(module)
        assert jamp.autocast(fn, policy=policy)(X).dtype == jnp.float32
    finally:
        del sys.modules["reloaded"]


def test_a_region_of_a_traced_program_holds_whatever_others_were_used_since():
    policy = jamp.Policy.load("cpu").with_rules(float32=["sin"])

    @jax.jit
    def inner(x):
        with jamp.autocast(policy=policy):
            return jnp.sin(x @ W)

    fn = jamp.autocast(lambda x: inner(x))
    assert jax.eval_shape(fn, X).dtype == jnp.float32

    def others(x, first):
        for number in range(first, first + 350):
            with jamp.autocast(policy=policy.scoped(f"layer_{number}", "float32")):
                x = x + 1
        return x

    for first in (0, 350, 700):
        jax.eval_shape(jamp.autocast(functools.partial(others, first=first)), X)
    assert fn(X).dtype == jnp.float32


def test_threads_share_functions_and_regions():
    def fn(x):
        with jamp.autocast(enabled=False):
            x = jax.nn.softmax(x) * 2
        return jax.nn.softmax(jax.nn.gelu(x @ W))

    shared = jamp.autocast(fn)
    expected = shared(X)
    found, start = [], threading.Barrier(6)

    def work(number):
        start.wait()
        for _ in range(3):
            found.append(shared(X))
            found.append(jax.jit(lambda x: shared(x))(X))
            with jamp.autocast(enabled=False):
                found.append(jamp.autocast(fn)(X))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 * 3 * 3
    for result in found:
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=2**-7)


def test_threads_share_the_programs_that_were_emitted_before(monkeypatch):
    source = jax.make_jaxpr(jnp.sin)(X).jaxpr
    # More than are kept.
    programs = [jax.make_jaxpr(jnp.sin)(jnp.ones(size)) for size in range(1, 25)]
    done = []

    def work():
        for program in programs * 200:
            assert recurring._known(source, program).in_avals == program.in_avals
        done.append(1)

    interval = sys.getswitchinterval()
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    threads = [threading.Thread(target=work) for _ in range(6)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(done) == 6


def test_tasks_interleave_between_calls():
    fn = jamp.autocast(lambda x: x @ W)
    outside = jamp.autocast(enabled=False)

    async def work(number):
        for _ in range(3):
            with outside:
                await asyncio.sleep(0)
                assert fn(X * number).dtype == jnp.bfloat16
            assert not jamp.is_autocast_enabled()
        return number

    async def all_of_them():
        return await asyncio.gather(*map(work, range(4)))

    assert asyncio.run(all_of_them()) == [0, 1, 2, 3]


@jax.custom_vjp
def with_gradient(x):
    return jnp.sin(x @ W)


def forward(x):
    return with_gradient(x), x


with_gradient.defvjp(forward, lambda x, cotangent: (cotangent * jnp.cos(x),))


@pytest.mark.parametrize(
    "fn", [jax.nn.relu, jax.nn.gelu, jax.nn.softmax, with_gradient]
)
def test_no_tracer_is_left_behind(fn, earlier_objects_left_alone):
    cast = jamp.autocast(fn)
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(lambda x: cast(x).astype(jnp.float32).sum()))(X)
        jax.make_jaxpr(jax.jit(jax.vmap(cast)))(W)
        jax.make_jaxpr(jamp.autocast(jax.jit(jax.grad(lambda x: fn(x).sum()))))(X)


def test_metadata_of_one_gradient_of_a_convolution_is_not_on_the_next():
    pictures, windows = jnp.ones((2, 8, 8)), jnp.ones((3, 8, 3))

    def lowered():
        cast = jamp.autocast(lambda x, w: jnp.sum(jax.lax.conv(x, w, (2,), "SAME")))
        return jax.jit(jax.grad(cast, (0, 1))).lower(pictures, windows).as_text()

    with set_xla_metadata(kept="yes"):
        assert "kept" in lowered()
    assert "kept" not in lowered()


def test_a_call_sees_the_settings_of_jax_that_are_around_it():
    fn = jamp.autocast(lambda x: x * jnp.arange(4.0).dtype.itemsize)
    np.testing.assert_array_equal(fn(X), X * 4)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(fn(X), X * 8)
