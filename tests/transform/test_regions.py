"""Regions and scopes: what holds where, and which of several rules wins."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from jaxprs import dtypes, matmul_dtypes, traced

import jamp

gpu = functools.partial(jamp.autocast, device_type="gpu")
GPU = jamp.Policy.load("gpu")
F16, BF16, F32 = "float16", "bfloat16", "float32"

x44 = jnp.ones((4, 4))


def product(x):
    return x @ x


@jax.jit
def helper(x):
    return jnp.tanh(x @ x)


def names(fn, *args):
    return list(dtypes(fn(*args)))


def test_a_disabled_region_runs_as_written():
    def fn(x):
        before = x @ x
        with jamp.autocast(enabled=False):
            inside = x @ x
            both = before + inside
        return before, inside, both, x @ x

    assert names(gpu(fn), x44) == [F16, F32, F32, F16]


def test_a_value_that_enters_a_disabled_region_is_brought_to_its_written_dtype():
    def fn(x):
        y = x @ x
        with jamp.autocast(enabled=False):
            return jnp.sin(y)

    (record,) = [
        r
        for r in jamp.explain(fn, device_type="gpu")(x44).records
        if r.primitive == "sin"
    ]
    assert [d.name for d in record.operands] == [F32]
    assert "enabled=False" in record.ruling.source


def test_a_region_may_have_another_dtype():
    def fn(x):
        with jamp.autocast(dtype=jnp.bfloat16):
            inside = x @ x
        return inside, x @ x

    assert names(gpu(fn), x44) == [BF16, F16]


def test_a_region_may_be_of_another_device_type_or_policy():
    policy = GPU.with_rules(float32=["dot_general"])

    def fn(x):
        with jamp.autocast(device_type="cpu"):
            other = x @ x, jnp.exp(x @ x)
        with jamp.autocast(policy=policy):
            wide = x @ x
        return *other, wide, x @ x

    assert names(gpu(fn), x44) == [BF16, BF16, F32, F16]


def test_a_region_without_a_dtype_has_the_policys_own():
    def fn(x):
        with jamp.autocast():
            return x @ x

    assert names(lambda x: [gpu(fn)(x)], x44) == [F16]


def test_regions_nest():
    def fn(x):
        results = [x @ x]
        with jamp.autocast(enabled=False):
            results.append(x @ x)
            with jamp.autocast(dtype=jnp.bfloat16):
                results.append(x @ x)
                with jamp.autocast(enabled=False):
                    results.append(x @ x)
                results.append(x @ x)
            results.append(x @ x)
        results.append(x @ x)
        return results

    assert names(gpu(fn), x44) == [F16, F32, BF16, F32, BF16, F32, F16]


def test_one_region_object_can_be_entered_again_also_inside_itself():
    disabled = jamp.autocast(enabled=False)

    def fn(x):
        results = []
        with disabled:
            results.append(x @ x)
            with disabled:
                results.append(x @ x)
            results.append(x @ x)
        results.append(x @ x)
        with disabled:
            results.append(x @ x)
        return results

    assert names(gpu(fn), x44) == [F32, F32, F32, F16, F32]


def test_a_recursive_function_with_a_region_leaves_it_every_time():
    disabled = jamp.autocast(enabled=False)

    def recurse(x, depth):
        with disabled:
            inner = recurse(x, depth - 1) if depth else []
        return [*inner, x @ x]

    assert names(lambda x: gpu(recurse)(x, 2), x44) == [F32, F32, F16]


def test_a_region_ends_when_its_body_raises():
    def fn(x):
        try:
            with jamp.autocast(enabled=False):
                y = x @ x
                raise LookupError
        except LookupError:
            return y, x @ x

    assert names(gpu(fn), x44) == [F32, F16]


def test_the_exception_of_a_body_passes_through():
    def fn(x):
        with jamp.autocast(enabled=False):
            raise LookupError("from the body")

    with pytest.raises(LookupError, match="from the body"):
        gpu(fn)(x44)
    assert not jamp.is_autocast_enabled()
    assert names(gpu(lambda x: [x @ x]), x44) == [F16]


@pytest.mark.parametrize("dtype, found", [("float32", F32), ("bfloat16", BF16)])
def test_a_switch_of_dtypes_disables_with_float32(dtype, found):
    on = dtype != "float32"

    def fn(x):
        with jamp.autocast(dtype=dtype, enabled=on):
            inside = x @ x
        return inside, x @ x

    assert names(gpu(fn), x44) == [found, F16]
    assert names(jamp.autocast(lambda x: [x @ x], dtype=dtype, enabled=on), x44) == [
        found
    ]


def test_a_disabled_function_inside_another_is_a_region():
    disabled = jamp.autocast(product, enabled=False)
    other = jamp.autocast(product, dtype=jnp.bfloat16)
    assert names(gpu(lambda x: (disabled(x), other(x), x @ x)), x44) == [F32, BF16, F16]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap, lambda f: f])
def test_a_region_inside_a_transformed_function_holds(wrap):
    def fn(x):
        with jamp.autocast(enabled=False):
            wide = x @ x
        return wide, x @ x

    assert names(gpu(wrap(fn)), jnp.ones((2, 4, 4))) == [F32, F16]


def test_a_region_around_a_jitted_function_holds_inside_it():
    def fn(x):
        with jamp.autocast(enabled=False):
            wide = helper(x)
        return wide, helper(x)

    assert names(gpu(fn), x44) == [F32, F16]
    assert matmul_dtypes(traced(gpu(fn), x44)) == [(F32, F32), (F16, F16)]


@jax.jit
def helper_that_enables(x):
    with jamp.autocast(dtype=jnp.bfloat16):
        inside = x @ x
    return inside, x @ x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_a_region_that_enables_inside_a_transformed_function_holds(wrap):
    def fn(x):
        with jamp.autocast(enabled=False):
            return wrap(helper_that_enables)(x)

    assert names(gpu(fn), jnp.ones((2, 4, 4))) == [BF16, F32]


def test_a_jitted_helper_shared_between_regions_is_not_mixed_up():
    def fn(x):
        results = [helper(x)]
        with jamp.autocast(enabled=False):
            results.append(helper(x))
        with jamp.autocast(dtype=jnp.bfloat16):
            results.append(helper(x))
        results.append(helper(x))
        return results

    assert helper(x44).dtype == F32
    assert names(gpu(fn), x44) == [F16, F32, BF16, F16]
    assert helper(x44).dtype == F32
    assert names(jamp.autocast(fn, device_type="cpu"), x44) == [BF16, F32, BF16, BF16]
    assert helper(x44).dtype == F32
    assert matmul_dtypes(traced(helper, x44)) == [(F32, F32)]


@jax.jit
def helper_with_region(x):
    with jamp.autocast(enabled=False):
        wide = x @ x
    return wide, x @ x


def test_a_jitted_helper_with_a_region_is_not_mixed_up_outside_autocast():
    for _ in range(2):
        assert names(helper_with_region, x44) == [F32, F32]
        assert names(gpu(helper_with_region), x44) == [F32, F16]
        assert names(jamp.autocast(helper_with_region, enabled=False), x44) == [
            F32,
            F32,
        ]


@jax.jit
def helper_that_asks(x):
    return x * (2 if jamp.is_autocast_enabled() else 3)


def test_a_jitted_helper_that_asks_for_the_state_is_traced_for_each():
    def fn(x):
        with jamp.autocast(enabled=False):
            return helper_that_asks(x)

    for _ in range(2):
        assert helper_that_asks(x44)[0, 0] == 3
        assert gpu(helper_that_asks)(x44)[0, 0] == 2
        assert gpu(fn)(x44)[0, 0] == 3


def test_a_device_type_that_there_is_not_is_no_answer():
    for asks in (jamp.is_autocast_enabled, jamp.get_autocast_dtype):
        with pytest.raises(jamp.AutocastError, match="npu"):
            asks("npu")


def test_the_state_inside_regions():
    seen = []

    def note():
        seen.append((jamp.is_autocast_enabled(), jamp.get_autocast_dtype().name))

    def fn(x):
        note()
        with jamp.autocast(enabled=False):
            note()
            with jamp.autocast(dtype=jnp.bfloat16):
                note()
        note()
        return x

    gpu(fn)(x44)
    assert [seen[0], seen[2], seen[3]] == [(True, F16), (True, BF16), (True, F16)]
    assert seen[1][0] is False


def test_a_disabled_region_outside_any_autocast_changes_nothing():
    with jamp.autocast(enabled=False):
        assert (x44 @ x44).dtype == F32
        assert not jamp.is_autocast_enabled()


def test_a_region_belongs_to_its_thread():
    seen = []

    def fn(x):
        thread = threading.Thread(
            target=lambda: seen.append(jamp.is_autocast_enabled())
        )
        thread.start()
        thread.join()
        seen.append(jamp.is_autocast_enabled())
        return x

    gpu(fn)(x44)
    assert seen == [False, True]


def test_backward_of_a_region_runs_in_its_dtypes():
    def fn(x):
        with jamp.autocast(enabled=False):
            wide = x @ (2 * x)
        return jnp.sum(wide) + jnp.sum((x @ x).astype(jnp.float32))

    found = matmul_dtypes(traced(jax.grad(gpu(fn)), x44))
    assert found.count((F32, F32)) == 3
    assert found.count((F16, F16)) == 3


def as_written_around_a_region(x):
    with jamp.autocast(device_type="cpu"):
        return x @ x


@pytest.mark.parametrize("wrap", [jamp.autocast, jamp.explain, jamp.diagnose])
def test_a_region_in_a_function_that_runs_as_written_says_how_to_switch_both(wrap):
    fn = wrap(as_written_around_a_region, device_type="cpu", enabled=False)
    with pytest.raises(jamp.AutocastError, match=r"enabled=jamp.is_autocast_enabled"):
        fn(jnp.eye(4))


def test_a_region_can_be_switched_by_what_is_around_it():
    def fn(x):
        with jamp.autocast(device_type="cpu", enabled=jamp.is_autocast_enabled()):
            return x @ x

    x = jnp.eye(4)
    assert fn(x).dtype == jnp.float32
    for enabled, dtype in ((False, jnp.float32), (True, jnp.bfloat16)):
        cast = jamp.autocast(fn, device_type="cpu", enabled=enabled)
        assert cast(x).dtype == dtype


def test_regions_of_policies_that_look_alike_have_their_own_rules():
    first, second = (GPU.with_rules(lower=[name]) for name in ("exp", "log"))
    assert repr(first) == repr(second)

    def fn(x):
        y = x @ x
        with jamp.autocast(policy=first):
            low = jnp.exp(y)
        with jamp.autocast(policy=second):
            wide = jnp.exp(y)
        return low, wide

    assert names(gpu(fn), x44) == [F16, F32]
