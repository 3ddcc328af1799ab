"""`python -m jamp`: what it prints, and its exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp.__main__ import main


def test_info_names_versions_devices_and_the_choice(capsys):
    assert main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["jamp"] == jamp.__version__
    assert lines["jax"] == jax.__version__
    assert (lines["policy"], lines["dtype"]) == ("cpu", "bfloat16")
    assert "bfloat16" in lines


@pytest.mark.parametrize("name", ["gpu", "cpu", "tpu"])
def test_a_policy_is_printed_with_every_entry_under_its_rule(name, capsys):
    assert main(["policy", name]) == 0
    text = capsys.readouterr().out
    policy = jamp.Policy.load(name)
    assert text.startswith(f"policy {name}, dtype {policy.dtype.name}\n")
    sections = {
        section.split(" ")[0]: section.splitlines()[1:]
        for section in text.split("\n\n")
    }
    for function, rule in policy.functions:
        assert f"  {function.name}" in sections[rule.value]
    assert "  dot_general" in sections["lower"]


def test_without_a_name_the_policy_is_that_of_the_devices(capsys):
    assert main(["policy"]) == 0
    assert capsys.readouterr().out.startswith("policy cpu, ")


def test_a_difference_is_a_line_and_an_exit_code(capsys):
    assert main(["policy", "gpu", "--diff", "gpu"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["policy", "gpu", "--diff", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "dtype: float16 -> bfloat16" in lines
    assert "exp: float32 -> internal_float32" in lines


def test_a_difference_in_what_keeps_the_dtype_of_activations_is_one(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "gpu"\n[results]\nactivation = ["jax.nn.softmax"]\n')
    assert main(["policy", "gpu", "--diff", str(file)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("results in the dtype of activations: ")
    assert " -> jax.nn.softmax, " in line


@pytest.mark.parametrize(
    "table, line",
    [
        (
            '[float32]\nelementwise = ["jax.numpy.sinc"]',
            "jax.numpy.sinc: internal_float32 -> float32 of elementwise calls",
        ),
        (
            '[lower]\nfunctions = ["flax.linen.Dense"]',
            "flax.linen.Dense: lower in its own code -> lower",
        ),
    ],
)
def test_a_difference_in_the_calls_that_a_rule_holds_for_is_one(
    table, line, tmp_path, capsys
):
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "gpu"\n{table}\n')
    assert main(["policy", "gpu", "--diff", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [line]


def test_a_file_that_is_no_policy_is_an_error_without_a_traceback(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nextends = "gpu"\n[lower]\nprimitives = ["sine"]\n')
    assert main(["policy", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jamp: ")
    assert "mine.toml" in printed.err
    assert "sine" in printed.err


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "jamp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"jamp {jamp.__version__}\n"
    with pytest.raises(SystemExit) as wrong_usage:
        main(["nothing"])
    assert wrong_usage.value.code == 2


TRAINING = """
import jax.numpy as jnp

def loss_fn(w, x, *, power=1):
    return jnp.mean(x @ w) ** power

def energy(w, x):
    return jnp.sum(((x @ w) * (x @ w)) @ w.T)

def with_aux(w, x):
    return jnp.mean(x @ w), x

def broken(w, x):
    return x @ w.no_such_thing

ready = 3

class Model:
    def loss(self, w, x):
        return jnp.mean(x @ w)

model = Model()

def __getattr__(name):
    if name == "lazy":
        return loss_fn
    raise AttributeError(name)
"""
INPUTS = """
import jax.numpy as jnp

args = (jnp.ones((4, 2)), jnp.ones((3, 4)))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module, train, and inputs of its functions."""
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    (tmp_path / "inputs.py").write_text(INPUTS, encoding="utf-8")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("train", "inputs", "script", "cast"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("target", ["train:loss_fn", "train.py:loss_fn", "train:lazy"])
def test_explain_prints_what_autocast_does_with_a_function(target, project, capsys):
    options = ["--device-type", "gpu", "--group", "equation"]
    assert main(["explain", target, "inputs.py", *options]) == 0
    printed = capsys.readouterr().out
    assert "autocast on gpu to float16" in printed
    assert "train.py:5" in printed


def test_a_method_of_an_object_is_a_function_too(project, capsys):
    assert main(["explain", "train:model.loss", "inputs.py"]) == 0
    assert "train.py:20" in capsys.readouterr().out
    assert main(["explain", "train:model.lose", "inputs.py"]) != 0
    assert "train has no 'model.lose'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "diagnose"])
def test_of_a_function_under_autocast_its_options_hold(command, project, capsys):
    code = "import jamp, train\ncast = jamp.autocast(train.loss_fn, device_type='gpu')"
    Path("cast.py").write_text(code, encoding="utf-8")
    assert main([command, "cast.py:cast", "inputs.py"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "autocast on gpu to float16, policy gpu"


def test_explain_writes_a_page_and_data(project):
    files = ["--html", "report.html", "--json", "report.json"]
    assert main(["explain", "train:loss_fn", "inputs.py", *files]) == 0
    assert "dot_general" in Path("report.html").read_text(encoding="utf-8")
    data = json.loads(Path("report.json").read_text(encoding="utf-8"))
    report = jamp.explain(lambda w, x: x @ w)(jnp.ones((4, 2)), jnp.ones((3, 4)))
    assert data.keys() == report.to_dict().keys()


def test_a_file_that_the_inputs_import_runs_once(project, capsys):
    (project / "train.py").write_text(TRAINING + "print('runs')\n", encoding="utf-8")
    inputs = "import train\n" + INPUTS
    (project / "inputs.py").write_text(inputs, encoding="utf-8")
    assert main(["explain", "train.py:loss_fn", "inputs.py"]) == 0
    assert capsys.readouterr().out.count("runs") == 1


@pytest.mark.parametrize("target", ["train.py", "train"])
def test_a_file_that_parses_arguments_finds_none(target, project, capsys):
    parses = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (project / "train.py").write_text(parses + TRAINING, encoding="utf-8")
    given = [*sys.argv]
    assert main(["explain", f"{target}:loss_fn", "inputs.py"]) == 0
    assert sys.argv == given


@pytest.mark.parametrize("name", ["json.py", "train.v2.py"])
def test_a_file_may_have_a_name_that_cannot_be_imported(name, project, capsys):
    (project / name).write_text(TRAINING, encoding="utf-8")
    assert main(["explain", f"{name}:loss_fn", "inputs.py"]) == 0
    assert f"{name}:5" in capsys.readouterr().out
    assert sys.modules["json"] is json


def test_a_terminal_gets_colours_within_its_width(project, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["explain", "train.py:loss_fn", "inputs.py"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 60
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["explain", "train.py:loss_fn", "inputs.py"]) == 0
    assert "\x1b[" not in capsys.readouterr().out


def test_inputs_may_name_arguments(project, capsys):
    file = project / "inputs.py"
    file.write_text(INPUTS + "kwargs = {'power': 2}\n", encoding="utf-8")
    assert main(["explain", "train:loss_fn", "inputs.py"]) == 0
    assert "integer_pow" in capsys.readouterr().out


def test_diagnose_finds_nothing_in_a_healthy_function(project):
    assert main(["diagnose", "train:loss_fn", "inputs.py"]) == 0


def test_diagnose_takes_the_gradient_of_a_loss_with_aux(project, capsys):
    options = ["--loss-scale", "1024", "--has-aux", "--argnums", "0,1"]
    assert main(["diagnose", *options, "train:with_aux", "inputs.py"]) == 0
    assert "error of the gradient" in capsys.readouterr().out


def test_a_picture_of_an_unknown_kind_is_an_error_of_its_own(project, capsys):
    options = ["--plot", "exponents.picture"]
    assert main(["diagnose", "train:loss_fn", "inputs.py", *options]) == 2
    assert "drawing exponents.picture failed" in capsys.readouterr().err


def test_diagnose_names_a_fault_and_exits_with_1(project, capsys):
    inputs = INPUTS.replace("args = (", "args = (1000 * ")
    (project / "inputs.py").write_text(inputs, encoding="utf-8")
    files = ["--plot", "exponents.png", "--json", "diagnosis.json"]
    options = ["--device-type", "gpu", *files]
    assert main(["diagnose", "train:energy", "inputs.py", *options]) == 1
    assert "train.py:8" in capsys.readouterr().out
    assert Path("exponents.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("diagnosis.json").read_text(encoding="utf-8"))["findings"]


@pytest.mark.parametrize(
    ("target", "inputs", "message"),
    [
        ("train", "inputs.py", "write module:function"),
        ("train:", "inputs.py", "write module:function"),
        ("train:nothing", "inputs.py", "train has no 'nothing'"),
        ("train:ready", "inputs.py", "train:ready is a int, not a function"),
        ("no_such_module:fn", "inputs.py", "importing no_such_module failed: Module"),
        ("absent.py:fn", "inputs.py", "there is no file absent.py"),
        ("train:loss_fn", "absent.py", "there is no file absent.py"),
        ("train:loss_fn", "train.py", "train.py must set args, a tuple"),
        ("train:broken", "inputs.py", "train.py:14: AttributeError"),
        ("train:loss_fn", "script.py", "script.py:2: SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "diagnose"])
def test_what_cannot_be_used_is_an_error_without_a_traceback(
    command, target, inputs, message, project, capsys
):
    assert main([command, target, inputs]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jamp: ")
    assert message in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float32"], "float32"),
        (["--device-type", "abacus"], "abacus"),
        (["--policy", "absent.toml"], "absent.toml"),
        (["--json", "no_such_folder/report.json"], "no_such_folder"),
    ],
)
def test_wrong_options_are_errors_without_a_traceback(
    options, message, project, capsys
):
    assert main(["explain", "train:loss_fn", "inputs.py", *options]) == 2
    assert message in capsys.readouterr().err
