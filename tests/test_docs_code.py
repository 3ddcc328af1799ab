"""Every Python block of the documentation runs, those of a page one after another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """The Python blocks of a page, each padded so that errors name its lines."""
    text = page.read_text("utf-8")
    for match in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(1)) + match.group(1)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(blocks(p))], ids=lambda p: p.name
)
def test_the_code_of_a_page_runs(page):
    names = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_a_block_that_fails_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        test_the_code_of_a_page_runs(page)
