"""Blocks of a model that are alike are one in every form of a report."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from terminals import shown

import jamp

X = jnp.ones((2, 8))


HERE = Path(__file__).name


GPU = jamp.Policy.load("gpu")


def source_line(part):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if part in text)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x)))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(12):
            x = Layer(name=f"block_{i}")(x)
        return nn.Dense(4, name="head")(x)


ALIKE = "block_0 ... block_11, the same 12 times"


@pytest.fixture(scope="module")
def decoder():
    x = jnp.ones((1, 3, 8))
    variables = jax.eval_shape(Decoder().init, jax.random.key(0), x)
    policy = GPU.scoped("**/block_3/up", "float32")
    return jamp.explain(Decoder().apply, device_type="gpu", policy=policy)(variables, x)


def test_equal_blocks_are_one_in_every_form_of_a_report(decoder):
    page = decoder.to_html()
    assert ALIKE in page and page.count("MultiHeadDotProductAttention_0</span>") < 2
    for text in (str(decoder), decoder.text("module"), shown(decoder, 100)):
        assert ALIKE in text
        assert set(re.findall(r"block_\d+", text)) == {"block_0", "block_3", "block_11"}
        assert len(text.splitlines()) < 75
    (network,) = decoder.to_dict()["modules"]["modules"]
    block, head = network["modules"]
    assert block["names"] == [f"block_{i}" for i in range(12)]
    assert (block["name"], head["names"]) == (ALIKE, ["head"])
    assert block["figures"]["matmuls"] == 12 * 8


def test_what_differs_between_equal_blocks_is_told(decoder):
    lines = [line for line in str(decoder).splitlines() if f"{HERE}:" in line]
    up = source_line('Dense(8, name="down")')
    assert any(
        "lower" in line and f"not block_3 up {HERE}:{up}" in line for line in lines
    )
    own = [line for line in lines if "only block_3" in line]
    assert own and all(f"{HERE}:{up}" in line for line in own)
    assert "flax.linen.Dense, only block_3" in decoder.text("module")
    assert "only block_3" in decoder.to_html()


def test_what_is_computed_again_stands_in_its_module():
    @jax.checkpoint
    def block(x):
        with jax.named_scope("block"):
            return jnp.sin(x @ x)

    gradient = jax.grad(lambda x: block(block(x)).sum())
    report = jamp.explain(gradient, device_type="gpu")(jnp.ones((4, 4)))
    assert {op.scope for op in report.operations} == {(), ("block",)}


def test_blocks_inside_blocks_that_are_alike_are_one():
    def fn(x):
        for i in range(3):
            with jax.named_scope(f"stage_{i}"):
                for j in range(2):
                    with jax.named_scope(f"block_{j}"):
                        x = jnp.tanh(x @ x.T) @ x
        return x

    heading, *table = str(jamp.explain(fn, device_type="gpu")(X)).splitlines()[5:]
    path = "stage_0 ... stage_2/block_0, block_1"
    assert heading == f"{path}, the same 6 times:"
    # What comes in is float32, and float16 from the first block on.
    marked = [line for line in table if "stage_0/block_0" in line]
    assert [re.findall(r"f32|f16|only|not", line)[1:] for line in marked] == [
        ["f32", "only"],
        ["f16", "not"],
    ]
    assert all(line.startswith("transpose ") for line in marked)


def test_the_first_of_haikus_modules_has_no_number_and_is_alike():
    def fn(x):
        for name in ("linear", "linear_1", "linear_2", "linear_3"):
            with jax.named_scope(name):
                x = x @ x.T @ x
        return x

    (module, *_) = jamp.explain(fn)(X).modules.children
    assert module.name == "linear, linear_1 ... linear_3, the same 4 times"


def test_blocks_of_other_sizes_or_lines_are_not_alike():
    @jax.jit
    def fn(x, y):
        for i, z in enumerate((x, x, y)):
            with jax.named_scope(f"block_{i}"):
                z @ z.T
        with jax.named_scope("block_3"):
            z = x @ x.T
        for i in range(2):
            with jax.named_scope(f"norm_{i}"):
                z = jnp.tanh(z)[: 2 - i]
        return z

    modules = jamp.explain(fn)(X, X[:1]).to_dict()["modules"]["modules"]
    names = [module["names"] for module in modules if "fn()" not in module["names"]]
    blocks = [["block_0", "block_1"], ["block_2"], ["block_3"]]
    assert names == [*blocks, ["norm_0"], ["norm_1"]]


def test_operations_of_a_librarys_attention_show_its_line_beside_the_users(decoder):
    users = source_line("x = x + nn.MultiHead")
    (product, _) = [
        line
        for line in str(decoder).splitlines()
        if "> attention.py" in line and line.startswith("dot_general")
    ]
    file, line = re.search(rf"{HERE}:{users} > (attention.py):(\d+)", product).groups()
    source = Path(nn.attention.__file__)
    assert file == source.name
    code = source.read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert "einsum" in code
    data = decoder.to_dict()["operations"]
    assert {op["library_file"] for op in data if op["library_line"] == int(line)} == {
        str(source)
    }
