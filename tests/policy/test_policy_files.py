"""Policies from the TOML files of users."""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from asked_policies import rule, under, x22

import jamp


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_extends_a_policy_and_overrides_it(tmp_path):
    path = write(
        tmp_path,
        """
        name = "mine"
        extends = "gpu"
        dtype = "bfloat16"
        [lower]
        primitives = ["sin"]
        functions = ["jax.nn.gelu"]
        [float32]
        primitives = ["dot_general"]
        """,
    )
    for policy in (jamp.Policy.load(path), jamp.Policy.load(str(path))):
        assert (policy.name, policy.dtype.name) == ("mine", "bfloat16")
        assert under(policy, jnp.sin) == "bfloat16"
        assert under(policy, lambda x: x @ x) == "float32"
        assert rule(policy, function=jax.nn.gelu) == "lower"
        assert rule(policy, "exp") == "float32"


def test_a_file_that_extends_nothing_knows_only_its_own_entries(tmp_path):
    path = write(tmp_path, 'dtype = "float16"\n[lower]\nprimitives = ["dot_general"]\n')
    policy = jamp.Policy.load(path)
    assert policy.name == "mine"
    assert under(policy, lambda x: x @ x) == "float16"
    assert rule(policy, "exp") is None
    assert under(policy, lambda x: jnp.exp(x @ x)) == "float32"


def test_a_function_whose_module_is_not_imported_waits_for_it(tmp_path):
    table = '[lower]\nfunctions = ["not_installed_anywhere.layers.Dense"]\n'
    path = write(tmp_path, f'extends = "gpu"\n{table}')
    with pytest.warns(jamp.JampWarning, match="lower.functions: 'not_installed_any"):
        policy = jamp.Policy.load(path)
    assert under(policy, lambda x: x @ x) == "float16"


def test_a_wrong_name_in_a_module_imported_later_names_file_and_key(
    tmp_path, monkeypatch
):
    (tmp_path / "imported_later.py").write_text("def doubled(x):\n    return x + x\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = '[float32]\nfunctions = ["imported_later.dubled"]\n'
    path = write(tmp_path, f'extends = "gpu"\n{table}')
    policy = jamp.Policy.load(path)
    importlib.import_module("imported_later")
    try:
        message = f"{path}: float32.functions: there is no .*imported_later.doubled"
        with pytest.raises(jamp.PolicyError, match=message):
            under(policy, lambda x: x @ x)
    finally:
        del sys.modules["imported_later"]


def test_a_float32_table_leaves_programs_as_written(tmp_path):
    path = write(
        tmp_path,
        'extends = "gpu"\n[float32]\nprimitives = ["dot_general", '
        '"conv_general_dilated"]\n',
    )
    fn = lambda x: jnp.tanh(x @ x) @ x  # noqa: E731
    rewritten = jamp.autocast(fn, policy=jamp.Policy.load(path))
    assert str(jax.make_jaxpr(rewritten)(x22)) == str(jax.make_jaxpr(fn)(x22))


KINDS = {"functions": "float32", "elementwise": "float16"}


@pytest.mark.parametrize("order", [[*KINDS], [*reversed(KINDS)]], ids=" then ".join)
def test_a_function_listed_for_its_elementwise_calls_alone_makes_another_policy(
    tmp_path, order
):
    def activation(x):
        return jnp.sin(x @ x)

    def found(kind):
        table = f'extends = "gpu"\n[float32]\n{kind} = ["owner.activation"]\n'
        policy = jamp.Policy.load(write(tmp_path, table))

        def region(x):
            with jamp.autocast(policy=policy):
                return owner.activation(x)

        return policy, under(jamp.Policy.load("gpu"), region)

    owner = types.ModuleType("owner")
    owner.activation = activation
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "owner", owner)
        policies, dtypes = zip(*map(found, order), strict=True)
    assert policies[0] != policies[1]
    assert dict(zip(order, dtypes, strict=True)) == KINDS
