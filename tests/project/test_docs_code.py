"""The code of README and docs runs, and prints what the pages show.

The blocks of a page run one after another, in a folder of their own. A block with the
title "Output" is what the Python block before it prints; one with another title is a
file of that name; a console block holds commands and what they print. Three dots stand
for anything.
"""

import contextlib
import doctest
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from jamp.__main__ import main as jamp_command

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
COMMAND = re.compile(r"^\$ python (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


class Block(NamedTuple):
    language: str
    title: str | None
    text: str
    line: int  # of its first line in the page


def blocks(page):
    """The blocks of a page that can be held to something."""
    text = page.read_text("utf-8")
    for match in BLOCK.finditer(text):
        block = Block(*match.groups(), text.count("\n", 0, match.start("text")))
        if block.language in {"python", "console"} or block.title:
            yield block


def assert_shown(shown, printed):
    # What three dots stand for may have widened a column.
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(shown, printed, flags):
        pytest.fail(f"the page shows\n\n{shown}\nbut this was printed:\n\n{printed}")


def output_of(arguments):
    """What `python` prints, given these arguments."""
    if arguments[:2] == ["-m", "jamp"]:
        # In this process, which has imported JAX.
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(output),
        ):
            jamp_command(arguments[2:])
        return output.getvalue()
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


def run(page):
    """Runs the blocks of a page."""
    names, printed = {}, ""
    for block in blocks(page):
        if block.title == "Output":
            assert_shown(block.text, printed)
        elif block.title:
            Path(block.title).write_text(block.text, "utf-8")
        elif block.language == "console":
            for arguments, shown in COMMAND.findall(block.text):
                assert_shown(shown, output_of(arguments.split()))
        else:
            # Padded, so that errors name the lines of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, names)
            printed = output.getvalue()


@pytest.fixture
def page(request, tmp_path, monkeypatch):
    """A page, with the working directory in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = request.param
    if isinstance(found, str):
        (tmp_path / "page.md").write_text(found, "utf-8")
        found = tmp_path / "page.md"
    for block in blocks(found):
        for name in IMPORT.findall(block.text) if block.language == "python" else ():
            if find_spec(name) is None:
                pytest.skip(f"the page uses {name}, which is not installed")
    return found


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(blocks(page))],
    indirect=True,
    ids=lambda page: page.name,
)
def test_the_code_of_a_page_runs(page):
    run(page)


WRONG = {
    "code": "```python\nassert 1 == 2\n```\n",
    "output": '```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n',
    "command": "```console\n$ python --version\nPython 2.7\n```\n",
    "file": '```text title="a.py"\nx = 1\n```\n\n```console\n$ python a.py\n1\n```\n',
}


@pytest.mark.parametrize("page", WRONG.values(), ids=WRONG, indirect=True)
def test_what_is_wrong_on_a_page_is_found(page):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(page)


RIGHT = {
    "continued": "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n",
    "output": '```python\nprint(1, 2)\n```\n\n```text title="Output"\n1 ...\n```\n',
    "command": "```console\n$ python -c print(1)\n1\n$ python -c print(2)\n2\n```\n",
    "file": '```text title="a.py"\nprint()\n```\n\n```console\n$ python a.py\n\n```\n',
}


@pytest.mark.parametrize("page", RIGHT.values(), ids=RIGHT, indirect=True)
def test_what_is_right_on_a_page_passes(page):
    run(page)
