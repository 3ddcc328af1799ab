"""Reports: the numbers and the text that jamp.explain gives."""

import inspect
import re
from itertools import pairwise
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jaxprs import casts, matmul_dtypes

import jamp

X = jnp.ones((2, 8))
HERE = Path(__file__).name


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="first")(x)  # first
        x = nn.LayerNorm(name="norm")(nn.gelu(x))  # norm
        y = jnp.matmul(x, x.T, precision="highest")  # square
        return y @ nn.Dense(4, name="second")(x)  # product


@pytest.fixture(scope="module")
def variables():
    return Network().init(jax.random.key(0), X)


@pytest.fixture(scope="module")
def report(variables):
    return jamp.explain(Network().apply, device_type="gpu")(variables, X)


def line(marker):
    lines, start = inspect.getsourcelines(Network)
    (offset,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(marker)]
    return start + offset


FIRST, SQUARE, SECOND, PRODUCT = (
    2 * 2 * 8 * 16,
    2 * 2 * 16 * 2,
    2 * 2 * 16 * 4,
    2 * 2 * 2 * 4,
)


def test_operations_are_counted_and_shared_out(report):
    assert report.flops == FIRST + SQUARE + SECOND + PRODUCT
    share = (FIRST + SECOND + PRODUCT) / report.flops
    assert report.low_flop_share == pytest.approx(share)
    assert f"{share:.1%}" in str(report)
    assert "3 of 4 matmuls and convolutions in 16 bits" in str(report)


def test_operations_of_a_convolution_are_counted():
    def fn(x, w):
        return jax.lax.conv(x, w, (1, 1), "VALID")

    report = jamp.explain(fn, device_type="gpu")(
        jnp.ones((1, 3, 6, 6)), jnp.ones((5, 3, 3, 3))
    )
    assert report.flops == 2 * (5 * 4 * 4) * (3 * 3 * 3)
    assert report.low_flop_share == 1


def test_casts_are_those_of_the_rewritten_program(report, variables):
    program = jax.make_jaxpr(jamp.autocast(Network().apply, device_type="gpu"))(
        variables, X
    )
    assert report.casts == len(casts(program)) > 0
    assert report.casts == sum(len(record.casts) for record in report.records)
    assert f"{report.casts} casts inserted" in str(report)


def test_the_header_names_device_dtype_and_policy(report, variables):
    assert report.header == "autocast on gpu to float16, policy gpu"
    assert str(report).splitlines()[0] == report.header
    other = jamp.explain(Network().apply, device_type="cpu", dtype=jnp.float16)
    assert other(variables, X).header == "autocast on cpu to float16, policy cpu"


UNDER_AUTOCAST = jamp.autocast(
    lambda x: x @ x.swapaxes(-1, -2), device_type="gpu", output_dtype=jnp.float32
)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.vmap])
def test_a_function_under_autocast_is_explained_with_its_own_options(wrap):
    report = jamp.explain(wrap(UNDER_AUTOCAST))(jnp.ones((3, 2, 8)))
    assert report.header == "autocast on gpu to float16, policy gpu"
    assert report.options.dtype == jnp.float16
    assert report.regions == ()


def test_a_step_with_a_loss_under_autocast_is_explained_as_it_runs():
    loss = jamp.autocast(lambda w: jnp.mean((X @ w) ** 2), device_type="gpu")

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w)
        return w - x @ grad, value

    report = jamp.explain(jax.jit(step))(X.T, X.T @ X)
    found = [
        tuple(dtype.name for dtype in record.operands)
        for record in report.records
        if record.primitive == "dot_general"
    ]
    program = jax.make_jaxpr(step)(X.T, X.T @ X)
    assert sorted(found) == sorted(matmul_dtypes(program))
    assert ("float32", "float32") in found and ("float16", "float16") in found
    where = "where the function has it, on gpu to float16, policy gpu; the rest"
    assert report.header == f"autocast {where} as written"
    assert "outside of autocast" in str(report)


def test_the_header_names_the_options_of_regions_that_have_others():
    def step(x):
        with jamp.autocast(enabled=False):
            x = jnp.sin(x)
        return 2 * UNDER_AUTOCAST(x)

    inside = "in regions: on gpu to float16, policy gpu"
    report = jamp.explain(step, device_type="cpu")(X)
    assert report.header == f"autocast on cpu to bfloat16, policy cpu; {inside}"
    (region,) = report.to_dict()["regions"]
    assert region == {
        "device_type": "gpu",
        "dtype": "float16",
        "policy": "gpu",
        "enabled": True,
    }
    assert "regions" not in jamp.explain(step, device_type="gpu")(X).header


def test_functions_are_named_with_their_rule_scope_and_line(report):
    rows = {text.split()[0]: text for text in str(report).splitlines() if text}
    norm = rows["flax.linen.LayerNorm"]
    for part in ("float32", "norm", f"{HERE}:{line('# norm')}"):
        assert part in norm
    assert "internal_float32" in rows["jax.nn.gelu"]
    dense = [text for text in str(report).splitlines() if "flax.linen.Dense" in text]
    assert len(dense) == 2
    assert "first" in dense[0]
    assert f"{HERE}:{line('# first')}" in dense[0]
    assert "f16" in dense[0]
    assert "lower" in dense[0]


def test_a_matmul_kept_by_its_precision_says_so(report):
    (text,) = [
        t
        for t in str(report).splitlines()
        if f":{line('# square')}" in t and "dot_general" in t
    ]
    assert "precision" in text
    assert "f32" in text


def test_records_hold_what_the_text_says(report):
    products = [r for r in report.records if r.primitive == "dot_general"]
    assert [r.computes_low for r in products] == [True, False, True, True]
    assert [r.scope for r in products] == [
        ("Network", "first"),
        ("Network",),
        ("Network", "second"),
        ("Network",),
    ]
    for record, marker in zip(
        products, ["# first", "# square", "# product", "# product"], strict=True
    ):
        assert Path(record.location.file).name == HERE
        assert record.location.line == line(marker)
        assert record.location.function == "__call__"
    assert [d.name for d in products[0].operands] == ["float16", "float16"]
    assert products[0].ruling.function.name == "flax.linen.Dense"
    assert products[0].ruling.rule.value == "lower"


def test_by_equation_there_is_a_line_for_each_record(report):
    text = report.text("equation")
    head = text.splitlines().index("") + 2
    assert len(text.splitlines()) - head == len(report.records)
    assert "2 f32->f16" in text
    assert "rsqrt" in text
    assert "rsqrt" not in report.text("function")
    assert report.text() == str(report)


def test_an_unknown_grouping_raises():
    report = jamp.explain(lambda x: x @ x.T)(X)
    with pytest.raises(jamp.AutocastError, match="group"):
        report.text("line")


ALL_WIDE = {
    "float32 policy": {
        "policy": jamp.Policy.load("gpu").with_rules(float32=["dot_general"])
    },
    "scope": {"policy": jamp.Policy.load("gpu").scoped("**", "float32")},
    "disabled": {"enabled": False},
}


@pytest.mark.parametrize("options", ALL_WIDE.values(), ids=ALL_WIDE)
def test_the_report_is_loud_when_no_matmul_is_lowered(options):
    report = jamp.explain(lambda x: x @ x.T, **options)(X)
    lines = str(report).splitlines()
    assert any(text.startswith("NO MATMUL RUNS IN 16 BITS") for text in lines[:2])
    assert report.low_flop_share == 0


def test_the_report_is_not_loud_otherwise(report):
    assert "NO MATMUL" not in str(report)
    empty = jamp.explain(lambda x: x + 1)(X)
    assert "NO MATMUL" not in str(empty)
    assert (empty.flops, empty.low_flop_share) == (0, 0)


def test_every_call_of_a_jitted_helper_is_counted():
    helper = jax.jit(lambda x: x @ x)

    def fn(x):
        return helper(helper(x))

    report = jamp.explain(fn, device_type="gpu")(jnp.ones((4, 4)))
    assert report.flops == 2 * (2 * 4**3)
    products = [r for r in report.records if r.primitive == "dot_general"]
    assert len(products) == 2
    assert report.casts == 1


def test_explain_computes_nothing_and_takes_static_arguments():
    def fn(x, mode, *, scale):
        assert mode == "square"
        assert isinstance(x, jax.core.Tracer)
        return (x @ x.T) * scale

    report = jamp.explain(fn, device_type="gpu", output_dtype=jnp.float32)(
        X, "square", scale=3
    )
    assert report.low_flop_share == 1


class Nameless:
    """As an equinox module that JAX has put together."""

    __name__ = object()

    def __call__(self, x):
        return x @ x.T


def test_what_has_a_name_that_is_no_string_is_called_as_its_type():
    report = jamp.explain(Nameless())(X)
    assert report.name == report.to_dict()["function"] == "Nameless"
    assert "Nameless" in report.to_html()


@pytest.mark.parametrize(
    ("fn", "name", "returns"),
    [
        (jax.nn.gelu, "jax.nn.gelu", "f16"),
        (jax.nn.softmax, "jax.nn.softmax", "f32"),
    ],
)
def test_a_function_returns_what_leaves_it(fn, name, returns):
    report = jamp.explain(lambda x: fn(x @ x), device_type="gpu")(jnp.ones((4, 4)))
    head, *lines = report.text().partition("\n\n")[2].splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    start = head.index("returns")
    assert line[start:].split()[0] == returns


def cells(report):
    """The lines of a report's table, by the names of its columns."""
    head, *lines = report.text().partition("\n\n")[2].splitlines()
    starts = [match.start() for match in re.finditer(r"(?<!\S)\S+( in)?", head)]
    bounds = list(pairwise([*starts, None]))
    table = [[text[slice(*bound)].strip() for bound in bounds] for text in lines]
    names = [head[slice(*bound)].strip() for bound in bounds]
    return [dict(zip(names, row, strict=True)) for row in table]


@pytest.mark.parametrize(
    ("fn", "name", "returns"),
    [
        (lambda w, x: ((x @ w) * 2.0, x * 2.0), "mul x2", "f16+f32"),
        (lambda w, x: (x * 2.0, (x @ w) * 2.0), "mul x2", "f32+f16"),
        (
            lambda w, x: (jax.nn.gelu(x @ w), jax.nn.gelu(x)),
            "jax.nn.gelu",
            "f16+f32",
        ),
        (lambda w, x: jax.nn.gelu(jax.nn.gelu(x) @ w), "jax.nn.gelu", "f32+f16"),
    ],
)
def test_a_line_of_several_equations_or_calls_returns_what_each_does(fn, name, returns):
    report = jamp.explain(fn, device_type="gpu")(jnp.ones((4, 4)), jnp.ones((4, 4)))
    (row,) = (row for row in cells(report) if row["operation"] == name)
    assert row["returns"] == returns


def test_a_call_for_which_nothing_was_decided_is_a_record_but_no_line():
    report = jamp.explain(lambda x: jax.nn.relu(x @ x.T), device_type="gpu")(X)
    assert [row["operation"] for row in cells(report)] == [
        "transpose",
        "dot_general",
        "max",
    ]
    primitives = [op["primitive"] for op in report.to_dict()["operations"]]
    assert primitives == [record.primitive for record in report.records]
    assert {"jit", "custom_jvp_call"} & set(primitives)
    assert report.text("equation").count("custom_jvp_call") == primitives.count(
        "custom_jvp_call"
    )


def test_a_call_that_casts_has_a_line():
    def fn(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: jnp.exp(x))

    report = jamp.explain(fn, device_type="gpu")(jnp.ones((4, 4)))
    (row,) = (row for row in cells(report) if row["operation"] == "cond")
    assert row["casts"] == "1"


def test_a_reason_names_the_policy_only_where_it_is_not_the_reports():
    def fn(x):
        return jnp.exp(UNDER_AUTOCAST(x))

    rows = {r["operation"]: r for r in cells(jamp.explain(fn, device_type="cpu")(X))}
    assert rows["dot_general"]["why"] == "lower: dot_general in gpu"
    assert rows["exp"]["why"] == "internal_float32"


def test_an_option_that_autocast_does_not_take_is_an_error():
    message = "explain .* not dtyp; did you mean 'dtype'"
    with pytest.raises(jamp.AutocastTypeError, match=message):
        jamp.explain(jnp.sin, dtyp=jnp.float16)
