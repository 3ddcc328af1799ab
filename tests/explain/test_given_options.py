"""Options that explain and diagnose are given, beside those of autocast itself."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jamp

X = jnp.ones((2, 2))
GPU = jamp.Policy.load("gpu")
VERBS = {
    "explain": jamp.explain,
    "diagnose": functools.partial(jamp.diagnose, progress=False),
}
OTHERS = {
    "device_type": "tpu",
    "dtype": jnp.bfloat16,
    "policy": GPU.with_rules(float32=["dot_general"]),
    "enabled": False,
    "cache_enabled": False,
}

each_verb = pytest.mark.parametrize("verb", VERBS)
each_wrap = pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["", "jit"])


def product(x):
    return x @ x


on_gpu = jamp.autocast(product, device_type="gpu")


@each_verb
@each_wrap
@pytest.mark.parametrize("name", OTHERS)
def test_another_option_than_that_of_a_function_under_autocast_raises(verb, wrap, name):
    with pytest.raises(jamp.AutocastError) as caught:
        VERBS[verb](wrap(on_gpu), **{name: OTHERS[name]})(X)
    assert re.search(
        f"{verb} was given {name}=.* with {name}=.*leave", str(caught.value)
    )


@each_verb
@each_wrap
def test_without_options_those_of_a_function_under_autocast_hold(verb, wrap):
    found = VERBS[verb](wrap(on_gpu))(X)
    assert found.header == "autocast on gpu to float16, policy gpu"


@each_verb
@each_wrap
def test_options_that_a_function_under_autocast_has_may_be_given_too(verb, wrap):
    given = {"device_type": "cuda", "dtype": "float16", "enabled": True}
    found = VERBS[verb](wrap(on_gpu), **given)(X)
    assert found.header == "autocast on gpu to float16, policy gpu"


@each_verb
@each_wrap
def test_a_function_under_autocast_that_names_no_device_takes_the_one_given(verb, wrap):
    found = VERBS[verb](wrap(jamp.autocast(product)), device_type="gpu")(X)
    assert found.header == "autocast on gpu to float16, policy gpu"


@each_verb
def test_a_function_that_autocast_leaves_as_it_is_cannot_be_enabled(verb):
    with pytest.raises(jamp.AutocastError, match=r"given enabled=True.*enabled=False"):
        VERBS[verb](jamp.autocast(product, enabled=False), enabled=True)(X)


@each_verb
def test_options_hold_for_what_is_not_under_autocast_itself(verb):
    def step(x):
        return x @ on_gpu(x)

    found = VERBS[verb](step, device_type="cpu")(X)
    assert found.header.startswith("autocast on cpu to bfloat16, policy cpu")


@each_verb
@pytest.mark.parametrize("name", ["policy", "dtype", "device_type", "output_dtype"])
def test_an_option_that_is_none_is_not_given(verb, name):
    def step(x):
        return x @ on_gpu(x)

    found = VERBS[verb](step, **{name: None})(X)
    assert found.header.startswith("autocast where the function has it")


@each_verb
def test_another_policy_of_the_same_name_is_told_as_such(verb):
    policies = [GPU.with_rules(float32=[name]) for name in ("sin", "cos")]
    step = jax.jit(jamp.autocast(product, policy=policies[0]))
    with pytest.raises(jamp.AutocastError, match="policy=another of that name"):
        VERBS[verb](step, policy=policies[1])(X)


@each_verb
def test_a_region_of_the_users_does_not_overrule_what_is_given(verb):
    def fn(x):
        with jamp.autocast(dtype=jnp.float16):
            return x @ x

    VERBS[verb](fn, dtype=jnp.bfloat16)(X)


LARGE = {"fn": lambda x: x @ x + 70000.0, "x": jnp.ones((4, 4))}


@pytest.mark.parametrize("wrapped", [False, True])
def test_results_are_looked_at_in_the_dtype_that_they_are_returned_in(wrapped):
    fn, options = LARGE["fn"], {"device_type": "gpu", "output_dtype": jnp.float16}
    if wrapped:
        fn, options = jamp.autocast(fn, **options), {}
    report = jamp.explain(fn, **options)(LARGE["x"])
    assert report.records[-1].results == (jnp.float16,)
    diagnosis = jamp.diagnose(fn, progress=False, **options)(LARGE["x"])
    assert not diagnosis.healthy
    assert jamp.diagnose(LARGE["fn"], progress=False)(LARGE["x"]).healthy


@each_verb
def test_another_output_dtype_than_that_of_a_function_under_autocast_raises(verb):
    fn = jamp.autocast(product, output_dtype=jnp.float32)
    VERBS[verb](fn, output_dtype=jnp.float32)(X)
    with pytest.raises(jamp.AutocastError, match="output_dtype=float16, but"):
        VERBS[verb](fn, output_dtype=jnp.float16)


@each_verb
@pytest.mark.parametrize("dtype", ["nonsense", jnp.int32])
def test_an_output_dtype_is_checked_as_autocast_does(verb, dtype):
    messages = []
    for wrap in (jamp.autocast, VERBS[verb]):
        with pytest.raises(jamp.AutocastTypeError) as caught:
            wrap(product, output_dtype=dtype)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
