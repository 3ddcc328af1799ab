"""Functions that policies name are recognised, and layers return torch's dtypes."""

import functools
import importlib
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import LOW
from flax import nnx
from function_examples import ATTENTION, EXAMPLES, LAYERS
from library_examples import INSTALLED, LIBRARY_EXAMPLES
from tables import check_each

import jamp

POLICIES = ("gpu", "cpu", "tpu")
ENTRIES = {
    policy: [function for function, _ in jamp.Policy.load(policy).functions]
    for policy in POLICIES
}


@functools.cache
def example(name):
    """A call of a function or layer, which is made once for all policies."""
    return (EXAMPLES | LIBRARY_EXAMPLES | ATTENTION)[name]()


# Recognition.


def test_every_entry_has_an_example_and_every_example_an_entry():
    assert {*EXAMPLES, *LIBRARY_EXAMPLES} == {
        function.name for functions in ENTRIES.values() for function in functions
    }


def recognised(report):
    """Code of the functions that ruled something; one function may have two names."""
    functions = [record.ruling.function for record in report.records]
    return {function.resolve() for function in functions if function is not None}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # optax renames functions
@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_of_a_listed_function_is_recognised(policy):
    loaded = jamp.Policy.load(policy)

    def check(function):
        fn, arguments = example(function.name)
        report = jamp.explain(fn, policy=loaded)(*arguments)
        assert function.resolve() in recognised(report)

    known = {*EXAMPLES, *INSTALLED}
    entries = [function for function in ENTRIES[policy] if function.name in known]
    check_each(entries, check, lambda function: function.name)


def test_a_copy_of_a_listed_function_is_not_recognised():
    def softmax(x):
        powers = jnp.exp(x - x.max())
        return powers / powers.sum()

    report = jamp.explain(softmax, device_type="gpu")(np.ones(4, np.float32))
    functions = {record.ruling.function for record in report.records} - {None}
    assert {function.name for function in functions} <= {"jax.numpy.sum"}


@pytest.mark.parametrize("function", [jnp.mean, jnp.std, jnp.sum, jnp.linalg.norm])
def test_calls_on_one_line_have_each_its_own_dtype(function):
    def fn(x, y):
        return [function(array, axis=-1) for array in (x @ x, y)]

    both = jamp.autocast(fn, device_type="cpu")(jnp.ones((2, 4, 4)), jnp.ones((5, 6)))
    assert [result.dtype.name for result in both] == ["bfloat16", "float32"]


def move(y):
    d = jnp.tanh(y)
    return y + 3e-3 * d


def moves(y):
    for _ in range(100):
        d = jnp.tanh(y)
        y = y + 3e-3 * d
    return y


def parts(y):
    return math.prod([jnp.tanh(5 * y) for _ in range(100)])


def calls(y):
    for _ in range(100):
        y = move(y)
    return y


@pytest.mark.parametrize("fn", [moves, parts, calls])
def test_a_python_loop_in_a_function_is_rounded_once(fn):
    policy = jamp.Policy.load("cpu").with_rules(internal_float32=[moves, parts, move])
    y = jnp.ones(4, jnp.bfloat16)
    found = jamp.autocast(fn, policy=policy)(y)
    np.testing.assert_array_equal(found, fn(np.ones(4, np.float32)).astype(found.dtype))


def test_a_call_whose_result_is_read_elsewhere_is_rounded():
    def fn(y):
        made = [y]
        for _ in range(3):
            made.append(move(made[-1]))
        return made, move(move(y))

    policy = jamp.Policy.load("cpu").with_rules(internal_float32=[move])
    made, last = jamp.autocast(fn, policy=policy)(jnp.ones(4, jnp.bfloat16))
    assert all((y == 1).all() for y in (*made, last))


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["sum", "mean", "var", "prod", "cumsum"])
@pytest.mark.parametrize("given", [int, bool])
def test_a_dtype_that_is_named_for_numbers_without_one_is_the_results(
    name, given, device
):
    fn = functools.partial(getattr(jnp, name), axis=0, dtype=jnp.bfloat16)
    x = np.array([[0, 1], [3, 1], [5, 1]], given)
    found = jamp.autocast(fn, device_type=device)(x)
    assert found.dtype == jnp.bfloat16
    expected = getattr(np, name)(x, axis=0, dtype=np.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=4e-3)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    source = "import jax.numpy as jnp\ndef score(x, y):\n    return jnp.tanh(x @ y)\n"
    (tmp_path / "own_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    return importlib.import_module("own_module")


def test_a_new_entry_takes_a_line_of_toml(own_module, tmp_path):
    table = tmp_path / "own.toml"
    entry = '[float32]\nfunctions = ["own_module.score"]\n'
    table.write_text(f'name = "own"\nextends = "gpu"\n{entry}')
    x = np.ones((4, 4), np.float32)
    policy = jamp.Policy.load(table)
    listed = jamp.explain(own_module.score, policy=policy)(x, x)
    unlisted = jamp.explain(own_module.score, device_type="gpu")(x, x)
    assert {record.ruling.function.name for record in listed.records} == {
        "own_module.score"
    }
    assert listed.low_flop_share == 0.0
    assert unlisted.low_flop_share == 1.0
    assert jamp.autocast(own_module.score, policy=policy)(x, x).dtype == jnp.float32


# Dtypes of layers. `low` is the policy's 16-bit dtype, `input` that of the activations;
# parameters are float32.

_LOWERED = """
    flax.linen.Dense flax.linen.DenseGeneral flax.linen.Einsum flax.linen.Conv
    flax.linen.ConvTranspose flax.linen.PReLU
    flax.nnx.Linear flax.nnx.LinearGeneral flax.nnx.Einsum flax.nnx.Conv
    flax.nnx.ConvTranspose flax.nnx.PReLU
    flax.linen.MultiHeadDotProductAttention flax.nnx.MultiHeadAttention
"""
_NORMS = """
    flax.linen.LayerNorm flax.linen.RMSNorm flax.linen.GroupNorm
    flax.nnx.LayerNorm flax.nnx.RMSNorm flax.nnx.GroupNorm
"""
_STATISTICS = """
    flax.linen.BatchNorm flax.linen.InstanceNorm
    flax.nnx.BatchNorm flax.nnx.InstanceNorm
"""
# A cell without a carry of its own beside the hidden state is a matmul and a tanh.
_SIMPLE_CELLS = "flax.linen.SimpleCell flax.nnx.SimpleCell"
# torch's CPU list has no cells: the gates are 16-bit, and mixing them with a float32
# carry promotes.
_GATED_CELLS = """
    flax.linen.GRUCell flax.linen.LSTMCell flax.linen.MGUCell
    flax.linen.OptimizedLSTMCell
    flax.nnx.GRUCell flax.nnx.LSTMCell flax.nnx.OptimizedLSTMCell
"""
_EMBEDDINGS = "flax.linen.Embed flax.nnx.Embed"

RETURNS = {
    name: {"gpu": gpu, "cpu": cpu}
    for names, gpu, cpu in (
        (_LOWERED, "low", "low"),
        (_NORMS, "float32", "input"),
        (_STATISTICS, "input", "input"),
        (_SIMPLE_CELLS, "low", "low"),
        (_GATED_CELLS, "low", "input"),
        (_EMBEDDINGS, "float32", "float32"),
    )
    for name in names.split()
}


def test_every_layer_has_a_dtype():
    assert set(RETURNS) == {*LAYERS, *ATTENTION}


@pytest.mark.parametrize("kind", ["float32", "low"])
@pytest.mark.parametrize("device", LOW)
@pytest.mark.parametrize("name", RETURNS)
def test_a_layer_returns_the_dtype_that_torch_returns(name, device, kind):
    low = np.dtype(LOW[device])
    dtype = low if kind == "low" else np.dtype(np.float32)
    fn, (parameters, *inputs) = example(name)
    inputs = jax.tree.map(
        lambda x: x.astype(dtype) if x.dtype == np.float32 else x, inputs
    )
    under_autocast = jamp.autocast(fn, device_type=device)
    outputs, state = jax.eval_shape(under_autocast, parameters, *inputs)
    expected = {"low": low, "input": dtype, "float32": np.dtype(np.float32)}
    returned = {leaf.dtype for leaf in jax.tree.leaves(outputs)}
    assert returned == {expected[RETURNS[name][device]]}
    # Running statistics among it: state keeps its dtype.
    kept = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert low not in kept


@pytest.mark.parametrize("device", LOW)
@pytest.mark.parametrize("name", ["flax.linen.BatchNorm", "flax.nnx.BatchNorm"])
def test_running_statistics_are_updated_in_float32(name, device):
    fn, (parameters, x) = LAYERS[name]()
    x = jnp.asarray(3 * x, LOW[device])
    _, state = jamp.autocast(fn, device_type=device)(parameters, x)
    flat = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
    mean = flat.get("batch_stats", flat)["mean"]
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, 0.99 * 1 + 0.01 * 3, rtol=1e-6)


def test_a_file_has_a_function_that_was_elementwise_as_it_lists_it(tmp_path):
    file = tmp_path / "mine.toml"
    name = "jax.lax.associative_scan"
    file.write_text(f'extends = "gpu"\n[float32]\nfunctions = ["{name}"]\n')

    def products(x):
        return jax.lax.associative_scan(lambda a, b: a @ b, x)

    changed = jamp.Policy.load("gpu").with_rules(float32=[name])
    for policy in jamp.Policy.load(file), changed:
        report = jamp.explain(products, policy=policy)(jnp.ones((4, 8, 8)))
        assert report.low_flop_share == 0.0
