"""How policies find the functions that they name, and tell them apart."""

import functools
import importlib
import sys
import types
from importlib.machinery import ModuleSpec

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from asked_policies import rule, under, x22
from flax import nnx

import jamp

GPU = jamp.Policy.load("gpu")


@pytest.fixture
def on_demand(monkeypatch):
    """Makes a package that imports its modules when it is asked for them."""

    def make(listed):
        package = types.ModuleType("on_demand")
        package.__path__ = []
        package.__spec__ = ModuleSpec("on_demand", None)
        package.__dir__ = lambda: [*listed]

        def imports(name):
            asked.append(name)
            raise ImportError(f"{name} needs another library")

        package.__getattr__ = imports
        monkeypatch.setitem(sys.modules, "on_demand", package)
        return asked

    asked = []
    return make


def test_what_a_package_imports_on_demand_is_not_imported_for_a_name(on_demand):
    asked = on_demand(["layers"])
    policy = GPU.with_rules(float32=["on_demand.layers.norm"])
    assert under(policy, lambda x: x @ x) == "float16"
    assert asked == []


def test_what_a_package_fails_to_import_is_not_imported_yet(on_demand):
    asked = on_demand([])
    policy = GPU.with_rules(float32=["on_demand.layers.norm"])
    assert under(policy, lambda x: x @ x) == "float16"
    assert set(asked) == {"layers"}


def test_a_module_and_a_function_in_it_may_have_one_name(tmp_path, monkeypatch):
    package = tmp_path / "alike"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "attention.py").write_text("def attention(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("alike", "alike.attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("alike")
    policy = GPU.with_rules(float32=["alike.attention.attention"])
    module = importlib.import_module("alike.attention")
    assert rule(policy, function=module.attention) == "float32"
    assert under(policy, lambda x: module.attention(x @ x)) == "float32"


def test_functions_of_equal_code_are_told_apart():
    source = "def scaled(x):\n    return x * scale\n"
    first, second = {"scale": 2.0}, {"scale": 3.0}
    exec(compile(source, "first.py", "exec"), first)
    exec(compile(source, "second.py", "exec"), second)
    fns = [made["scaled"] for made in (first, second)]

    def dtypes(policy):
        return [under(policy, lambda x, fn=fn: fn(x @ x)) for fn in fns]

    one = GPU.with_rules(float32=[fns[0]])
    assert dtypes(one) == ["float32", "float16"]
    assert [rule(one, function=fn) for fn in fns] == ["float32", None]
    assert dtypes(GPU.with_rules(float32=fns)) == ["float32", "float32"]
    apart = GPU.with_rules(float32=[fns[0]], promote=[fns[1]])
    assert dtypes(apart) == ["float32", "float16"]
    assert one != GPU.with_rules(float32=[fns[1]])


@pytest.mark.parametrize("entry", ["jax.nn.softmax", jax.nn.softmax])
@pytest.mark.parametrize("kind", ["float32", "internal_float32"])
def test_a_combination_that_raises_knows_a_function_by_any_of_its_names(entry, kind):
    policy = GPU.with_rules(**{kind: [entry]})

    def logarithm(x):
        return jnp.log(jax.nn.softmax(x).astype(jnp.float16))

    with pytest.raises(jamp.BannedOpError, match="log of a probability"):
        jamp.autocast(logarithm, policy=policy)(x22)


def own(x):
    return x


@pytest.mark.parametrize(
    "entry, name",
    [
        (jax.nn.softmax, "jax.nn.softmax"),
        (nn.Dense, "flax.linen.Dense"),
        (nnx.Linear.__call__, "flax.nnx.Linear.__call__"),
        (functools.partial(own, 1), f"{__name__}.own"),
    ],
)
def test_a_function_is_called_by_its_public_name(entry, name):
    (function, _) = GPU.with_rules(as_traced=[entry]).functions[-1]
    assert function.name == name
