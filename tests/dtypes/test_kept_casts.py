"""Casts to float32 that the user writes, of what is float32 as traced."""

import threading
from functools import partial
from itertools import chain

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jaxprs import traced

import jamp
from jamp import _compat
from jamp._policy.policy import Policy

# Small integers, of which 16 bits lose nothing.
EYE = np.eye(8, dtype=np.float32)
x, w = jax.device_put((EYE[:4] + 1, EYE))
DEVICES = {"gpu": "float16", "cpu": "bfloat16"}
every_device = pytest.mark.parametrize("device, dtype", DEVICES.items())


def cast(y):
    return y.astype(jnp.float32)


@jax.custom_jvp
def by_jvp(y):
    return cast(y) * 2


by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), cast(tangents[0]) * 2))


@jax.custom_vjp
def by_vjp(y):
    return cast(y) * 2


by_vjp.defvjp(lambda y: (by_vjp(y), ()), lambda _, g: (cast(g) * 2,))


def in_loop(y):
    step = lambda carry, row: (carry + cast(row).sum(), cast(row))  # noqa: E731
    return jax.lax.scan(step, 0.0, y)[1]


CASTS = {
    "astype": cast,
    "asarray": lambda y: jnp.asarray(y, jnp.float32),
    "array": lambda y: jnp.array(y, "float32"),
    "type": jnp.float32,
    "lax": lambda y: jax.lax.convert_element_type(y, jnp.float32),
    "dtype of another": lambda y: y.astype(w.dtype),
    "jit": jax.jit(lambda y: cast(y)),
    "map": lambda y: jax.lax.map(cast, y),
    "scan": in_loop,
    "cond": lambda y: jax.lax.cond(y[0, 0] > 0, cast, lambda z: z, y),
    "checkpoint": jax.checkpoint(cast),
    "vmap": jax.vmap(cast),
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "after a norm": lambda y: cast(y - y.mean() * jnp.zeros(8)),
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)


@every_device
@every_cast
def test_a_cast_holds_until_the_next_product(cast, device, dtype):
    def fn(x, w):
        y = x @ w
        return y, cast(y), cast(y) + y, cast(y) @ w

    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert [r.dtype.name for r in found] == [dtype, "float32", "float32", dtype]


@every_device
def test_what_casts_nothing_is_no_cast(device, dtype):
    def fn(x, w):
        y = x @ w
        flat = jnp.array([y[0], y[1]]), jnp.asarray([y[0]]), jnp.array(y[0], ndmin=2)
        return jnp.asarray(y), jnp.array(y), *flat, jnp.where(y > 0, y, y + 1.0)

    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert {r.dtype.name for r in found} == {dtype}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_rounding_to_float64_is_no_cast(dtype):
    with jax.enable_x64(True):
        fn = lambda y: y * jax.lax.reduce_precision(y, 11, 52)  # noqa: E731
        assert jamp.autocast(fn)(x.astype(dtype)).dtype == dtype


@every_device
def test_casts_of_libraries_are_none(device, dtype):
    dense = nn.Dense(8, dtype=jnp.float32)
    fn = lambda x, w: dense.apply({"params": {"kernel": w, "bias": w[0]}}, x)  # noqa: E731
    assert jax.eval_shape(jamp.autocast(fn, device_type=device), x, w).dtype == dtype


@every_device
def test_what_enters_a_region_as_written_is_cast_in_it(device, dtype):
    def fn(x, w):
        y = x @ w
        with jamp.autocast(enabled=False):
            return y, cast(y)

    found = jax.eval_shape(jamp.autocast(fn, device_type=device), x, w)
    assert [r.dtype.name for r in found] == [dtype, "float32"]


def in_kernel(y):
    def kernel(source, target):
        target[...] = source[...].astype(jnp.float32) * 2

    return pl.pallas_call(kernel, jax.typeof(y), interpret=True)(y)


def in_reference(y):
    ref = jax.new_ref(y)
    jax.jit(lambda: ref.set(cast(ref[...])))()
    return ref[...]


def listed(y):
    return jax.jit(lambda z: cast(z) * 2)(cast(jnp.exp(y)))


def opaque(x, w):
    return in_kernel(x @ w), in_reference(x @ w), listed(x @ w)


def differentiated(x, w):
    saving = jax.checkpoint_policies.dots_saveable
    for casts in CASTS.values():
        x = jax.checkpoint(casts, policy=saving)(jnp.tanh(x @ w))
    return x.sum()


PROGRAMS = {
    "opaque": opaque,
    "differentiated": jax.grad(differentiated),
    **{name: lambda x, w, cast=cast: cast(x @ w) for name, cast in CASTS.items()},
}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def marks(fn, *arguments):
    # Nobody else rounds to the bits of float64.
    return str(traced(fn, *arguments)).count("exponent_bits=11 mantissa_bits=52")


@every_device
@every_program
def test_nothing_else_is_left_of_a_cast(program, device, dtype):
    policy = Policy.load(device).with_rules(float32=[listed])
    under = jamp.autocast(program, policy=policy)
    assert marks(under, x, w) == marks(program, x, w)
    if program is not opaque:
        batched = jax.vmap(under, in_axes=(0, None)), jnp.stack([x, x]), w
        assert marks(*batched) == marks(program, x, w)
    loss = lambda x, w: sum(r.sum() for r in jax.tree.leaves(under(x, w)))  # noqa: E731
    if program in map(PROGRAMS.get, CASTS):
        assert marks(jax.grad(loss), x, w) == 0


@every_program
def test_a_cast_is_none_where_all_is_float32(program):
    policy = Policy.load("gpu").with_rules(float32=["dot_general"])
    if program is not opaque:
        found = jax.eval_shape(jamp.autocast(program, policy=policy), x, w)
        assert all(r.dtype == jnp.float32 for r in jax.tree.leaves(found))
        assert marks(jamp.autocast(program, policy=policy), x, w) == 0


def norm(x):
    variance = jnp.square(cast(x)).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-6)


def block(x, w):
    return norm(jnp.tanh(jax.jit(norm)(x @ w) @ w))


def test_a_program_in_float32_stays_the_same():
    written = str(traced(block, x, w))
    policy = Policy.load("gpu").with_rules(float32=["dot_general"])
    assert str(traced(jamp.autocast(block, policy=policy), x, w)) == written
    within = jamp.autocast(block, enabled=False)
    assert str(traced(jamp.autocast(within), x, w)) == written
    assert str(traced(within, x, w)) == written


@pytest.mark.numbers
@every_device
@every_cast
def test_gradients_of_a_cast_are_those_as_written(cast, device, dtype):
    def loss(w):
        return (cast(x @ w) ** 2).sum()

    def step(w):
        forward = jax.jvp(loss, (w,), (w,)) if cast is not by_vjp else None
        return jax.grad(loss)(w), forward

    gradient = jax.grad(loss)

    # One program is compiled sooner; roundings stay where two would have them.
    @partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def both(w):
        under = [jamp.autocast(fn, device_type=device)(w) for fn in (step, gradient)]
        outside = jax.grad(jamp.autocast(loss, device_type=device))(w)
        return (*under, outside), (step(w), gradient(w), gradient(w))

    jax.tree.map(np.testing.assert_array_equal, *both(w))


@pytest.mark.parametrize("first", ["under autocast", "as written"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_trace_that_jax_keeps_serves_its_own_side_alone(first, transform):
    inner = jax.jit(lambda y: cast(y * y).sum())
    fn = lambda x, w: transform(inner)(x[0] @ w if transform is jax.vmap else x @ w)  # noqa: E731
    under = jamp.autocast(fn, device_type="gpu")
    sides = [(under, "1"), (fn, "0")]
    texts = {}
    for side, name in sides if first == "under autocast" else sides[::-1]:
        texts[name] = str(traced(side, x, w))
    assert "reduce_precision" not in texts["0"] + texts["1"]
    assert "f16" in texts["1"] and "convert" not in texts["0"]


def test_what_layers_share_stays_one_program():
    shared = jax.jit(norm)
    layers = lambda x, w: shared(shared(shared(x @ w) @ w) @ w)  # noqa: E731
    eqns = traced(jamp.autocast(layers, device_type="gpu"), x, w).eqns
    _, second, third = (e.params["jaxpr"] for e in eqns if "jaxpr" in e.params)
    assert second is third


converted_p = Primitive("converted")
converted_p.def_abstract_eval(lambda y, **params: y)


@converted_p.def_impl
def call_converted(y, *, static, made):
    assert static[0] is made.program, "called with other static arguments"
    return jaxpr_as_fun(static[0])(y)[0]


class Converted:
    """A function as Equinox converts it, which is compared by the program it became."""

    def __init__(self, fn, y):
        self.program = jax.make_jaxpr(fn)(y)

    def __call__(self, y):
        static = self.program, "another argument"
        return converted_p.bind(y, static=static, made=self)


def test_a_program_among_static_data_of_another_library_stays_the_one_that_it_was():
    def fn(x, w):
        y = x @ w
        return Converted(lambda y: cast(y) * 2, y)(y)

    found = jamp.autocast(fn, device_type="gpu")(x, w)
    np.testing.assert_array_equal(found, x @ w * 2)
    assert found.dtype == jnp.float32


def jaxs_own():
    """What jamp stands in for while it traces."""
    primitives = custom_jvp_call_p, custom_vjp_call_p
    binds = [type(primitive).bind_with_trace for primitive in primitives]
    functions = (_compat._lax, _compat._CONVERT), (_compat._pjit, _compat._INFER)
    return *(getattr(*function) for function in functions), *binds


def test_jax_is_changed_only_while_jamp_traces():
    own, seen = jaxs_own(), []

    def fn(x, fails=False):
        seen.append(jaxs_own())
        y = jamp.autocast(lambda x: x @ x.T)(x) + jax.jit(jamp.autocast(cast))(x).sum()
        seen.append(jaxs_own())
        if fails:
            raise KeyError
        return y

    under = jamp.autocast(fn)
    jax.jit(jax.grad(lambda x: under(x).sum()))(x)
    with pytest.raises(KeyError):
        under(x, fails=True)
    assert set(own).isdisjoint(chain(*seen)) and len(set(seen)) == 2
    assert jaxs_own() == own


def test_threads_trace_side_by_side():
    own, inside, leave = jaxs_own(), threading.Event(), threading.Event()

    def slow(y):
        inside.set()
        assert leave.wait(60)
        return cast(y @ w)

    thread = threading.Thread(target=jamp.autocast(slow), args=(x,))
    thread.start()
    assert inside.wait(60)
    # Here nothing is under autocast, and then another trace ends first.
    written = str(jax.make_jaxpr(cast)(x))
    assert jax.eval_shape(jamp.autocast(lambda y: cast(y @ w)), x).dtype == jnp.float32
    assert set(own).isdisjoint(jaxs_own())
    leave.set()
    thread.join()
    assert "reduce_precision" not in written
    assert jaxs_own() == own


def test_without_the_private_function_casts_are_none(monkeypatch):
    monkeypatch.setattr(_compat, "_CONVERT", "renamed")
    fn = jamp.autocast(lambda x, w: cast(x @ w), device_type="gpu")
    assert jax.eval_shape(fn, x, w).dtype == jnp.float16


def test_a_cast_is_reported_at_the_users_line():
    fn = lambda x, w: cast(x @ w)  # noqa: E731
    *_, row = str(jamp.explain(fn, device_type="gpu")(x, w)).splitlines()
    line = cast.__code__.co_firstlineno + 1
    assert row.startswith("convert_element_type  f16          f32")
    assert f"test_kept_casts.py:{line} " in row
