"""How a diagnosis is told, drawn and handed on, and what is no diagnosis."""

import dataclasses
import inspect
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diagnosed import EYE, X, diagnose, line_of, mean, product, square

import jamp
from jamp._diagnose import entry


def test_a_diagnosis_is_data():
    diagnosis = diagnose(lambda x: mean(square(product(x))), loss_scale=1.0)(X)
    assert not diagnosis.healthy
    found = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert found["findings"][0]["location"]["line"] == line_of(square)
    assert found["healthy"] is False
    assert found["errors"]["loss"] is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.findings = ()


def test_the_text_names_line_limit_and_cure():
    text = str(diagnose(lambda x: mean(square(product(x))))(X))
    path = inspect.getsourcefile(square)
    assert f"{path}:{line_of(square)} (square)" in text
    assert "it reaches 9e+04, float16 holds 6.55e+04" in text
    assert re.search(r'ran again: healthy.*jamp.Policy.load\("gpu"\)', text, re.DOTALL)


def test_a_number_just_above_the_largest_is_told_from_it():
    found = diagnose(lambda x: product(x) * 2.0)(EYE * 2.0**15)
    assert "it reaches 65536, float16 holds 65504" in str(found)


def test_what_is_not_finite_inside_of_an_operation_is_told_from_what_is_too_large():
    def solve(b):
        return jax.scipy.sparse.linalg.bicgstab(lambda v: EYE @ v, b)[0]

    (finding,) = diagnose(solve)(jnp.full(len(EYE), 1e5)).findings
    assert finding.kind == "overflow"
    assert "custom_linear_solve in float32 is not finite" in finding.message
    assert "though float32 holds its result" in finding.message


def test_a_gradient_that_becomes_nan_by_what_was_rounded_is_said_to():
    def angles(w, x):
        h = x @ w
        norms = jnp.linalg.norm(h, axis=1)
        similar = (h @ h.T) / (norms[:, None] * norms)  # of each with itself it is 1
        return jnp.mean(jnp.arccos(jnp.clip(similar * 0.999, -1, 1)))

    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=shape).astype("f") for shape in ((8, 8), (16, 8))]
    found = diagnose(angles, dtype=jnp.bfloat16, loss_scale=1.0)(*arguments)
    assert math.isinf(found.gradient_error)
    assert "of which later operations make inf or NaN" in str(found)


def test_a_healthy_diagnosis_says_where_it_has_not_looked_at_gradients():
    told = "gradients were not looked at"
    assert told in str(diagnose(product)(X))
    assert told not in str(diagnose(lambda x: product(x).sum(), loss_scale=1.0)(X))
    assert told not in str(diagnose(lambda x: mean(square(product(x))))(X))


def test_complex_results_are_compared():
    found = diagnose(lambda x: jax.lax.complex(*[product(square(x))] * 2))(X)
    assert [f.kind for f in found.findings] == ["overflow"]
    assert found.errors["result"] == math.inf


def test_float64_results_are_compared():
    def fn(x):
        return product(square(x)).astype(jnp.float64)

    with jax.enable_x64(True):
        found = diagnose(fn)(X)
        healthy = diagnose(lambda x: (x @ x).sum(), loss_scale=1.0)(np.float64(EYE))
    assert found.errors["result"] == math.inf
    assert healthy.healthy


@pytest.mark.parametrize("unit", [1e40, 1e-60])
def test_float64_results_may_be_such_as_float32_does_not_hold(unit):
    def fn(x):
        return jnp.sum(product(x / 300)).astype(jnp.float64) * unit

    with jax.enable_x64(True):
        found = diagnose(fn)(X)
    assert found.healthy
    assert 0 < found.errors["result"] < 1e-3


def test_of_a_gradient_that_is_rounding_alone_no_error_is_told():
    """That of a divergence of two distributions which are nearly the same."""

    def divergence(w, x):
        p, q = (jax.nn.softmax(x @ (w * by)) for by in (1.0, 1.001))
        return jnp.mean(jnp.sum(p * (jnp.log(p) - jnp.log(q)), -1))

    w, x = (jax.random.normal(jax.random.key(n), (64, 64)) / 8 for n in (0, 1))
    found = jamp.diagnose(divergence, device_type="cpu", loss_scale=1.0)(w, 8 * x)
    assert found.gradient_error is None
    assert "error of the gradient" not in str(found)


@pytest.mark.parametrize("choose", [jnp.argmax, lambda h: h > 0])
def test_where_nothing_is_compared_it_does_not_say_healthy(choose):
    text = str(diagnose(lambda x: choose(product(square(x))))(X))
    assert "nothing to compare: no result is floating or complex" in text
    assert "healthy" not in text


def test_what_is_wrong_with_one_line_in_several_modules_is_said_once(tmp_path):
    def fn(x):
        sums = []
        for i in range(3):
            with jax.named_scope(f"block_{i}/a_module_with_a_long_name"):
                sums.append(mean(square(product(x))))
        return sums

    diagnosis = diagnose(fn)(X)
    assert len(diagnosis.findings) == 3
    text = str(diagnosis)
    assert text.count("overflow: ") == 1
    assert "(square), in block_0/a_module_with_a_long_name, and in 2 more mod" in text
    diagnosis.plot(tmp_path / "diagnosis.svg")
    picture = (tmp_path / "diagnosis.svg").read_text("utf-8")
    assert "overflow \u25b6 block_1/a_module...long_name -->" in picture


def test_a_name_in_a_picture_is_no_formula(tmp_path):
    def fn(x):
        with jax.named_scope("cost_in_$_of_$"):
            return mean(square(product(x)))

    diagnose(fn)(X).plot(tmp_path / "diagnosis.svg")
    picture = (tmp_path / "diagnosis.svg").read_text("utf-8")
    assert "cost_in_$_of_$ -->" in picture


@pytest.mark.parametrize("loss_scale", [None, 1.0, 2.0**40])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_picture_is_drawn(loss_scale, dtype, tmp_path):
    diagnosis = diagnose(
        lambda x: jnp.mean(product(x)), loss_scale=loss_scale, dtype=dtype
    )(X)
    diagnosis.plot(tmp_path / "diagnosis.png")
    assert (tmp_path / "diagnosis.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_the_module_at_fault_among_many_larger_ones(tmp_path):
    def fn(x, w):
        for i in range(20):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
            if i == 7:
                with jax.named_scope("culprit"):
                    square = 300 * x[:1, :2] @ (300 * w[:2, :1])
        return x, square

    diagnosis = jamp.diagnose(fn, device_type="gpu")(X, 30 * jnp.ones_like(X @ X.T))
    diagnosis.plot(tmp_path / "diagnosis.svg")
    picture = (tmp_path / "diagnosis.svg").read_text("utf-8")
    drawn = re.findall("<!-- (.*(?:layer_|culprit).*) -->", picture)
    assert "overflow \u25b6 culprit" in drawn
    assert len(drawn) < 20
    assert [h.findings for h in diagnosis.histograms if h.findings] == [("overflow",)]


def test_progress_is_shown_on_stderr_if_asked_for(capsys):
    jamp.diagnose(product, device_type="gpu", progress=True)(X)
    assert "diagnosing" in capsys.readouterr().err
    diagnose(product)(X)
    assert capsys.readouterr() == ("", "")


def test_without_rich_progress_is_a_plain_line(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    jamp.diagnose(product, device_type="gpu", progress=True)(X)
    assert re.search(r"diagnosing: (\d+) of \1 operations", capsys.readouterr().err)


def test_progress_ends_where_the_program_does(capsys, monkeypatch):
    """A branch counts for one operation, as a loop does."""
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    monkeypatch.setattr(entry, "_EVERY", 1)

    def fn(x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(jnp.cos(x)) + 1, jnp.tanh, x)
        return x @ x

    jamp.diagnose(fn, device_type="gpu", progress=True)(X)
    shown = re.findall(r"(\d+) of (\d+) operations", capsys.readouterr().err)
    assert shown
    assert all(int(done) <= int(total) for done, total in shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": 0.0}, "loss_scale must be positive"),
        ({"loss_scale": float("inf")}, "loss_scale must be positive"),
        ({"loss_scale": float("nan")}, "loss_scale must be positive"),
        ({"loss_scale": -1.0}, "loss_scale must be positive"),
        ({"loss_scale": 1e39}, "loss_scale must be positive and a float32"),
        ({"loss_scale": 1e-50}, "loss_scale must be positive and a float32"),
        ({"loss_scale": "x"}, "loss_scale must be a number, got 'x'"),
        ({"loss_scale": 1.0, "argnums": 3}, "there are 1 positional arguments"),
        ({"argnums": None}, "argnums must be the number of an argument, or several"),
        ({"argnums": "w"}, "argnums must be the number of .*, got 'w'"),
        ({"argnums": 1.0}, "argnums must be the number of .*, got 1.0"),
        (
            {"dtypes": jnp.float16},
            "progress and the options of jamp.autocast, not dtypes",
        ),
        ({"los_scale": 1.0}, r"not los_scale; did you mean 'loss_scale'\?"),
        ({"dtype": jnp.float32}, "dtype must be float16 or bfloat16"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(jamp.JampError, match=message):
        diagnose(product, **options)(X)


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (lambda x: x, (3,), "give it some arrays"),
        (product, (jax.ShapeDtypeStruct((8, 8), np.float32),), "arrays with values"),
        (product, (X,), r"a scalar, got an array of shape \(8, 8\): take"),
        (lambda x: 1.0, (X,), "the loss is the number 1.0, which has no"),
        (lambda x: None, (X,), "the loss function returned None: it lacks a return"),
        (lambda x: (x.sum(), x), (X,), "a tuple; pass has_aux=True"),
        (lambda x: x.sum(), (np.arange(3),), "there are none"),
    ],
)
def test_wrong_calls_raise(fn, args, message):
    with pytest.raises(jamp.JampError, match=message):
        diagnose(fn, loss_scale=1.0)(*args)


def test_what_is_no_function_raises():
    with pytest.raises(jamp.AutocastTypeError, match="takes a function, got int"):
        jamp.diagnose(3)


def test_under_a_transformation_it_raises():
    with pytest.raises(jamp.AutocastTypeError, match="outside of"):
        jax.jit(lambda x: diagnose(product)(x).healthy)(X)


def test_an_error_of_the_function_is_its_own():
    def fn(x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        diagnose(fn)(X)
