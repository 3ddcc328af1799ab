"""Policies as data: loading, deriving, asking, printing, comparing."""

import dataclasses
import functools
import itertools
import pickle
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from asked_policies import rule, under, x22
from flax import nnx
from jax import lax
from jax.extend.core import Primitive

import jamp

GPU = jamp.Policy.load("gpu")
CPU = jamp.Policy.load("cpu")


def wraps_itself(x):
    return x


wraps_itself.__wrapped__ = wraps_itself


@pytest.mark.parametrize(
    "name, dtype", [("gpu", "float16"), ("cpu", "bfloat16"), ("tpu", "bfloat16")]
)
def test_each_device_type_has_a_policy(name, dtype):
    policy = jamp.Policy.load(name)
    assert (policy.name, policy.dtype.name) == (name, dtype)
    assert rule(policy, "dot_general") == "lower"
    assert under(policy, lambda x: x @ x) == dtype


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_other_names_of_a_gpu_load_its_policy(name):
    assert jamp.Policy.load(name) == GPU


@pytest.mark.parametrize(
    "primitive, gpu, cpu",
    [
        ("dot_general", "lower", "lower"),
        ("exp", "float32", "internal_float32"),
        ("reduce_sum", "float32", "internal_float32"),
        ("reduce_prod", "float32", "float32"),
        ("add", "promote", "promote"),
        ("iota", "as_traced", "as_traced"),
        (Primitive("a_users_own"), None, None),
    ],
)
def test_the_rule_of_a_primitive(primitive, gpu, cpu):
    assert (rule(GPU, primitive), rule(CPU, primitive)) == (gpu, cpu)


@pytest.mark.parametrize(
    "asked, told",
    [
        ("dot_generla", "unknown primitive 'dot_generla'; did you mean 'dot_general'?"),
        ("matmul", "unknown primitive 'matmul'; did you mean 'dot_general'?"),
        ("conv2d", "did you mean 'conv_general_dilated'?"),
        ("softmax", "did you mean 'jax.nn.softmax'?"),
        ("jax.nn.softmax", r"jax.nn.softmax is a function.*rule\(function=...\)"),
        (jax.nn.softmax, r"softmax is a function.*rule\(function=...\)"),
    ],
)
def test_to_ask_of_what_is_no_primitive_is_an_error(asked, told):
    with pytest.raises(jamp.PolicyError, match=told):
        GPU.rule(asked)


def test_a_rule_can_be_asked_by_object_name_function_and_scope():
    assert rule(GPU, lax.exp_p) == "float32"
    assert rule(GPU, function=jax.nn.softmax) == "float32"
    assert rule(GPU, function="jax.nn.softmax") == "float32"
    assert rule(GPU, "exp", function=jax.nn.gelu) == "internal_float32"
    assert rule(GPU, "exp", function=lambda x: x) == "float32"
    scoped = GPU.scoped("a/*", "lower")
    assert rule(scoped, "exp", function=jax.nn.gelu, scope="a/b") == "lower"
    assert rule(scoped, "exp", scope=("a", "b", "c")) == "lower"
    assert rule(scoped, "exp", scope="a") == "float32"


def own(x):
    return jnp.sin(x) + x


class Layer:
    """A callable class."""

    def __call__(self, x):
        return jnp.sin(x)


class Wave:
    """A class whose numbers are properties."""

    def __init__(self, x):
        self.x = x

    @property
    def height(self):
        return jnp.sin(self.x)

    @functools.cached_property
    def depth(self):
        return jnp.sin(self.x)


@pytest.mark.parametrize("entry", ["sin", lax.sin_p])
def test_with_rules_takes_primitives(entry):
    policy = GPU.with_rules(lower=[entry])
    assert (under(GPU, jnp.sin), under(policy, jnp.sin)) == ("float32", "float16")
    # A rule for the sine alone leaves the sum to promote to float32.
    assert under(policy, own) == "float32"


@pytest.mark.parametrize(
    "entry, fn",
    [
        (own, own),
        (f"{__name__}.own", own),
        (jnp.sum, jnp.sum),
        ("jax.nn.relu", jax.nn.relu),
        ("jax.nn.softmax", jax.nn.softmax),
    ],
)
def test_with_rules_takes_functions_and_dotted_names(entry, fn):
    assert under(GPU, fn) == "float32"
    assert under(GPU.with_rules(lower=[entry]), fn) == "float16"


@pytest.mark.parametrize("fn", [jnp.sin, jnp.square, jnp.abs])
def test_a_rule_for_a_function_that_jax_inlines_is_refused(fn):
    with pytest.raises(jamp.PolicyError, match=r"JAX inlines .* where it is called"):
        GPU.with_rules(lower=[fn])


def test_with_rules_takes_a_jitted_function_a_class_and_a_method():
    jitted = jax.jit(own)
    assert under(GPU.with_rules(lower=[jitted]), jitted) == "float16"
    assert under(GPU.with_rules(lower=[Layer]), Layer()) == "float16"
    assert under(GPU.with_rules(lower=[Layer.__call__]), Layer()) == "float16"


@pytest.mark.parametrize("name", ["height", "depth"])
def test_with_rules_takes_a_property_as_what_computes_it(name):
    def read(x):
        return getattr(Wave(x), name)

    by_object = GPU.with_rules(lower=[vars(Wave)[name]])
    by_name = GPU.with_rules(lower=[f"{__name__}.Wave.{name}"])
    found = [under(policy, read) for policy in (GPU, by_object, by_name)]
    assert found == ["float32", "float16", "float16"]
    assert f"Wave.{name}" in str(by_object)


def test_with_rules_overrides_and_leaves_the_original_alone():
    policy = GPU.with_rules(
        float32=["dot_general"], promote=["exp"], lower=["jax.nn.gelu"]
    )
    assert under(policy, lambda x: x @ x) == "float32"
    assert rule(policy, "exp") == "promote"
    assert rule(policy, function=jax.nn.gelu) == "lower"
    assert rule(GPU, "dot_general") == "lower"
    assert rule(GPU, "exp") == "float32"


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("lower", "float16"),
        ("float32", "float32"),
        ("internal_float32", "bfloat16"),
        ("promote", "bfloat16"),
        ("as_traced", "bfloat16"),
    ],
)
@pytest.mark.parametrize("entry", ["primitive", "function", "scope"])
def test_every_rule_does_what_it_says_on_a_16_bit_operand(name, dtype, entry):
    def sine(x):
        return jnp.sin(x)

    def fn(x):
        with jax.named_scope("here"):
            return sine(x)

    policy = {
        "primitive": lambda: GPU.with_rules(**{name: ["sin"]}),
        "function": lambda: GPU.with_rules(**{name: [sine]}),
        "scope": lambda: GPU.scoped("here", name),
    }[entry]()
    x = x22.astype(jnp.bfloat16)
    assert jamp.autocast(fn, policy=policy)(x).dtype == dtype


def test_internal_float32_computes_in_float32():
    policy = GPU.with_rules(internal_float32=["sin"])
    (record,) = jamp.explain(lax.sin, policy=policy)(x22.astype(jnp.float16)).records
    assert [d.name for d in record.operands] == ["float32"]
    assert [d.name for d in record.results] == ["float16"]


@pytest.mark.parametrize("entry", [jnp.fft.irfft, "jax.numpy.fft.irfft"])
def test_a_function_returns_the_dtype_of_activations_by_whatever_it_is_named(entry):
    policy = GPU.with_rules(internal_float32=[entry])
    assert under(policy, lambda x: jnp.fft.irfft(x.astype(jnp.float16), 2)) == "float16"


def test_a_banned_function_or_primitive_raises():
    for policy in (GPU.with_rules(banned=["sin"]), GPU.with_rules(banned=[own])):
        with pytest.raises(jamp.BannedOpError, match="banned"):
            jamp.autocast(own, policy=policy)(x22)


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"lowr": ["exp"]}, ["lowr", "lower"]),
        ({"float16": ["exp"]}, ["float16", "did you mean 'lower'?"]),
        ({"lower": ["expp"]}, ["unknown primitive", "expp", "dotted names"]),
        ({"lower": ["softmax"]}, ["unknown primitive", "as in jax.nn.softmax"]),
        ({"lower": ["jax.nn.no_such_function"]}, ["jax.nn.no_such_function"]),
        ({"lower": "exp"}, ["list"]),
        ({"lower": ["exp"], "float32": ["exp"]}, ["exp", "two"]),
        ({"lower": [own], "float32": [own]}, ["own", "two"]),
        ({"lower": ["jax.nn.relu"], "float32": [jax.nn.relu]}, ["relu", "two"]),
        ({"lower": ["jnp.exp"]}, ["'jnp'", "not installed", "as 'jax.numpy.interp'"]),
        ({"lower": [jnp.add]}, ["<jnp.ufunc 'add'> is no", "the primitive that it"]),
        ({"lower": [3]}, ["3 is no"]),
        ({"lower": [jax.nn.relu, None]}, ["None"]),
        ({"lower": [len]}, ["len"]),
        ({"lower": 3}, ["lower=3", "give a list"]),
        ({"lower": None}, ["lower=None", "give a list"]),
        ({"lower": [jnp.float32]}, ["jax.numpy.float32 is no Python function"]),
        ({"lower": ["jax..nn"]}, ["'jax..nn' is not a dotted name"]),
        ({"lower": ["jax.nn.sotfmax"]}, ["did you mean 'jax.nn.softmax'?"]),
        ({"lower": ["tahn"]}, ["did you mean 'tanh'?"]),
        ({"flaot32": ["exp"]}, ["did you mean 'float32'?"]),
        ({"lower": [wraps_itself]}, ["wraps itself"]),
        ({"lower": [nnx.Dropout(0.5)]}, ["give Dropout itself"]),
    ],
)
def test_wrong_rules_raise_and_say_what(rules, words):
    with pytest.raises(jamp.PolicyError) as error:
        GPU.with_rules(**rules)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_scope_needs_a_pattern_and_a_known_rule():
    for pattern in ("", None, 3, ["a"]):
        with pytest.raises(jamp.PolicyError, match="pattern is a non-empty string"):
            GPU.scoped(pattern, "lower")
    for name in ("lowr", None, ["lower"]):
        with pytest.raises(jamp.PolicyError, match="unknown rule"):
            GPU.scoped("a", name)


PATTERNS = ["a", "*", "**", "a/**", "**/b", "a*", "*b*a", "a**b", "**/a/**/b", "*/b"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_what_it_stands_for_as_a_regular_expression(pattern):
    parts = [
        "([^/]+/)*" if part == "**" else part.replace("*", "[^/]*") + "/"
        for part in pattern.split("/")
    ]
    expression = re.compile("".join(parts) + ".*")
    policy = GPU.scoped(pattern, "banned")
    words = ["a", "b", "ab", "ba", "aba", "abb"]
    for length in range(4):
        for names in itertools.product(words, repeat=length):
            found = expression.fullmatch("".join(f"{name}/" for name in names))
            assert (rule(policy, scope=names) == "banned") == bool(found), names


@pytest.mark.parametrize("pattern", ["**/" * 30 + "x", "*a" * 30 + "x"])
def test_a_long_pattern_takes_no_time_to_match(pattern):
    start = time.perf_counter()
    assert GPU.scoped(pattern, "banned").rule(scope=("a" * 60,) * 60) is None
    assert time.perf_counter() - start < 1


def test_the_name_says_that_a_policy_was_derived():
    assert GPU.with_rules(lower=["sin"]).name == "gpu*"
    assert GPU.scoped("a", "lower").with_rules(lower=["sin"]).name == "gpu*"


def test_its_repr_is_one_short_line():
    assert repr(GPU).startswith("<Policy gpu, dtype float16, ")
    assert len(repr(GPU)) < 60


def test_text_lists_every_rule_with_its_entries():
    text = str(GPU.scoped("**/head", "float32").with_rules(banned=["sin"]))
    for part in ("gpu*", "float16", "dot_general", "jax.nn.softmax", "**/head", "sin"):
        assert part in text
    lines = text.splitlines()
    rules = ["lower", "float32", "internal_float32", "promote", "as_traced", "banned"]
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert [title.split(" ")[0] for title in titles] == [*rules, "results", "unsafe"]


def test_equal_policies_are_equal_and_hash_alike():
    first, second = (
        jamp.Policy.load("gpu").with_rules(lower=["sin", own]).scoped("a", "float32")
        for _ in range(2)
    )
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, GPU}) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_a_policy_takes_a_dtype_by_any_of_its_names(dtype):
    policy = dataclasses.replace(GPU, dtype=dtype)
    assert under(policy, lambda x: x @ x) == "bfloat16"
    assert policy == dataclasses.replace(GPU, dtype=jnp.dtype(jnp.bfloat16))


def test_a_policy_can_be_sent_to_another_process():
    policy = GPU.with_rules(float32=[jax.nn.relu, "sin"]).scoped("a", "float32")
    hash(policy)  # which other processes do not share
    load = "import pickle, sys; p = pickle.load(sys.stdin.buffer)"
    show = f"{load}; print('_hash' in vars(p), p)"
    sent = subprocess.run(
        [sys.executable, "-c", show],
        input=pickle.dumps(policy),
        capture_output=True,
        check=True,
    )
    assert sent.stdout.decode().strip() == f"False {policy}"
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_function_that_no_name_stands_for_cannot_be_pickled():
    def local(x):
        return x

    with pytest.raises(TypeError, match="cannot pickle code object"):
        pickle.dumps(GPU.with_rules(float32=[local]))


@pytest.mark.parametrize(
    "other",
    [
        GPU.with_rules(lower=["sin"]),
        GPU.with_rules(lower=[own]),
        GPU.scoped("a", "lower"),
        dataclasses.replace(GPU, dtype=jnp.dtype(jnp.bfloat16)),
        dataclasses.replace(GPU, unsafe=()),
        CPU,
    ],
)
def test_policies_that_differ_anywhere_are_not_equal(other):
    assert other != GPU


def test_a_policy_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPU.dtype = jnp.bfloat16
