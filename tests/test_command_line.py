"""`python -m jamp`: what it prints, and its exit codes."""

import subprocess
import sys

import jax
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


def test_a_file_that_is_no_policy_is_an_error_without_a_traceback(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nextends = "gpu"\n[lower]\nprimitives = ["sine"]\n')
    assert main(["policy", str(file)]) == 1
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
