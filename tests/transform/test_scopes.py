"""Rules of scopes, which flax fills with the paths of modules."""

import functools
from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes, matmul_dtypes, traced
from tables import check_each

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
GPU = jamp.Policy.load("gpu")
F16, BF16, F32 = "float16", "bfloat16", "float32"

x44 = jnp.ones((4, 4))


@jax.jit
def helper(x):
    return jnp.tanh(x @ x)


def names(fn, *args):
    return list(dtypes(fn(*args)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="second")(nn.relu(nn.Dense(4, name="first")(x)))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(3, name="head")(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Encoder(name="encoder")(x)


@pytest.fixture(scope="module")
def flax_model():
    model = Model()
    return model, model.init(jax.random.key(0), x44)


SCOPES = {
    "**/head": [4],
    "**/first": [0, 2],
    "**/block_1": [2, 3],
    "**/block_*/second": [1, 3],
    "Model/encoder/block_0/first": [0],
    "Model/encoder": [0, 1, 2, 3, 4],
    "Model/*/block_*": [0, 1, 2, 3],
    "**/encoder/**/second": [1, 3],
    "encoder/block_0": [],
    "Model/block_0": [],
    "**/bloc": [],
    "**/hea*": [4],
}


@pytest.mark.parametrize("pattern, wide", SCOPES.items())
def test_scopes_match_flax_module_paths(flax_model, pattern, wide):
    model, variables = flax_model
    fn = jamp.autocast(model.apply, policy=GPU.scoped(pattern, "float32"))
    unmatched = pytest.warns(jamp.JampWarning, match="no operation of the first")
    with nullcontext() if wide else unmatched:
        found = matmul_dtypes(traced(fn, variables, x44))
    assert [i for i, pair in enumerate(found) if pair == (F32, F32)] == wide
    assert len(found) == 5


def test_a_pattern_that_matches_nothing_warns_once_at_the_users_line(flax_model):
    model, variables = flax_model
    policy = GPU.scoped("**/head", "float32").scoped("**/tail", "float32")
    fn = jamp.autocast(model.apply, policy=policy)
    with pytest.warns(jamp.JampWarning, match=r"matches '\*\*/tail'; later") as warned:
        fn(variables, x44)
    assert [w.filename for w in warned] == [__file__]
    fn(variables, x44[:2])
    # To ask for a rule changes nothing.
    asked = GPU.scoped("**/nowhere", "float32")
    assert asked.rule("dot_general", scope="a/nowhere").value == "float32"
    with pytest.warns(jamp.JampWarning, match=r"matches '\*\*/nowhere'; later"):
        jamp.autocast(model.apply, policy=asked)(variables, x44)
    # What one program lacks another may have.
    found = GPU.scoped("**/first", "float32")
    jamp.autocast(model.apply, policy=found)(variables, x44)
    jamp.autocast(jnp.sin, policy=found)(x44)


def test_module_paths_are_recorded_once(flax_model):
    model, variables = flax_model
    records = jamp.explain(model.apply, device_type="gpu")(variables, x44).records
    scopes = [r.scope for r in records if r.primitive == "dot_general"]
    expected = [
        f"Model/encoder/block_{i}/{n}" for i in (0, 1) for n in ("first", "second")
    ]
    assert ["/".join(scope) for scope in scopes] == [*expected, "Model/encoder/head"]


def test_scopes_match_named_scopes_also_through_a_jit():
    def fn(x):
        with jax.named_scope("outer"):
            inside = x @ x, helper(x)
            with jax.named_scope("inner"):
                deep = x @ x
        return *inside, deep, x @ x

    wide = jamp.autocast(fn, policy=GPU.scoped("outer", "float32"))
    assert names(wide, x44) == [F32, F32, F32, F16]
    deep = jamp.autocast(fn, policy=GPU.scoped("outer/inner", "float32"))
    assert names(deep, x44) == [F16, F16, F32, F16]


def test_scopes_match_what_is_differentiated_and_computed_again():
    @jax.checkpoint
    def layer(x):
        with jax.named_scope("layer"):
            return helper(x)

    def loss(x):
        with jax.named_scope("block"):
            return layer(layer(x)).sum()

    def under(pattern):
        policy = GPU.scoped(pattern, "float32")
        return matmul_dtypes(traced(jamp.autocast(jax.grad(loss), policy=policy), x44))

    every = under("block/layer")
    # Both layers forward, again, and backward for both operands of each.
    assert every == [(F32, F32)] * len(every)
    assert len(every) == 2 + 2 + 4
    with pytest.warns(jamp.JampWarning, match="no operation of the first"):
        assert under("block/block/layer") == [(F16, F16)] * len(every)


def test_scopes_of_one_name_in_each_other_are_two():
    def fn(x):
        with jax.named_scope("a"):
            x = x @ x
            with jax.named_scope("a"):
                return x, x @ x

    assert names(jamp.autocast(fn, policy=GPU.scoped("a/a", "float32")), x44) == [
        F16,
        F32,
    ]
    rows = jamp.explain(fn)(x44).text("module").splitlines()
    modules = [row[:6].rstrip() for row in rows if row.split()[:1] == ["a"]]
    assert modules == ["  a", "    a"]


def test_the_last_scope_that_matches_wins():
    def fn(x):
        with jax.named_scope("a"), jax.named_scope("b"):
            return x @ x

    policy = GPU.scoped("a", "lower").scoped("a/b", "float32")
    assert jamp.autocast(fn, policy=policy)(x44).dtype == F32
    policy = GPU.scoped("a/b", "float32").scoped("a", "lower")
    assert jamp.autocast(fn, policy=policy)(x44).dtype == F16


def norm_like(x):
    return jnp.sin(x) * 2


def test_a_scope_beats_a_function_which_beats_a_primitive_which_beats_the_default():
    def fn(x):
        return jnp.sin(x)

    def scoped(x):
        with jax.named_scope("here"):
            return norm_like(x)

    x = x44
    primitive = GPU.with_rules(lower=["sin"])
    function = primitive.with_rules(float32=[norm_like])
    scope = function.scoped("here", "lower")
    default = jamp.autocast(fn, policy=GPU)(x), jamp.autocast(fn, policy=primitive)(x)
    assert list(dtypes(default)) == [F32, F16]
    low = x.astype(jnp.float16)
    assert jamp.autocast(scoped, policy=primitive)(low).dtype == F16
    assert jamp.autocast(scoped, policy=function)(low).dtype == F32
    assert jamp.autocast(scoped, policy=scope)(low).dtype == F16


# With whether their results may have 16 bits, which bits and complex numbers may not.
WITHOUT_16_BITS = {
    "cholesky": (jnp.linalg.cholesky, True),
    "eigh": (lax.linalg.eigh, True),
    "lu": (lambda x: lax.linalg.lu(x)[0], True),
    "qr": (lax.linalg.qr, True),
    "svd": (lax.linalg.svd, True),
    "triangular solve": (lambda x: lax.linalg.triangular_solve(x, x), True),
    "rfft": (jnp.fft.rfft, False),
    "complex": (lambda x: lax.complex(x, x), False),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32), False),
}
POLICIES = {"gpu": F16, "cpu": BF16}


@pytest.mark.parametrize("rule", ["lower", "promote"])
@pytest.mark.parametrize("device_type", POLICIES)
def test_what_has_no_16_bit_kernel_computes_in_float32(rule, device_type):
    policy = jamp.Policy.load(device_type).scoped("here", rule)
    x = 4 * jnp.eye(4) + jnp.tri(4) + jnp.tri(4).T  # exact in 16 bits

    def check(name):
        fn, rounds = WITHOUT_16_BITS[name]

        def scoped(x):
            low = x @ jnp.eye(4)
            with jax.named_scope("here"):
                return fn(low)

        found = jax.tree.leaves(jamp.autocast(scoped, policy=policy)(x))
        for one, other in zip(found, jax.tree.leaves(fn(x)), strict=True):
            assert one.dtype == (POLICIES[device_type] if rounds else other.dtype)
            np.testing.assert_allclose(one.astype(other.dtype), other, 0.02, 0.01)

    check_each(WITHOUT_16_BITS, check)


def test_an_inverse_in_a_lowered_scope_has_16_bits():
    def scoped(x):
        with jax.named_scope("here"):
            return jnp.linalg.inv(x)

    found = jamp.autocast(scoped, policy=GPU.scoped("here", "lower"))(4 * jnp.eye(4))
    assert found.dtype == F16
    np.testing.assert_array_equal(found, jnp.eye(4) / 4)


def test_a_disabled_region_beats_a_scope_and_a_function():
    policy = GPU.scoped("here", "lower")

    def fn(x):
        with jax.named_scope("here"), jamp.autocast(enabled=False):
            return x @ x

    assert jamp.autocast(fn, policy=policy)(x44).dtype == F32

    def function(x):
        y = x @ x
        with jamp.autocast(enabled=False):
            z = jax.nn.softmax(y.astype(jnp.bfloat16))
        return z

    assert gpu(function)(x44).dtype == BF16
