"""docs/ecosystem.md says what was measured."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "ecosystem_page", ROOT / "docs/generate_ecosystem.py"
)
generator = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generator)


def test_the_page_is_that_of_the_results():
    written = (ROOT / "docs/ecosystem.md").read_text("utf-8")
    expected = generator.page(generator.newest())
    assert written == expected, "run python docs/generate_ecosystem.py"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_program_that_runs_in_float32_runs_under_autocast(dtype):
    figures = generator.newest()["figures"]
    assert len(figures) >= 40
    failing = {
        name: found[dtype]["error"]
        for name, found in figures.items()
        if "error" not in found["float32"] and "error" in found[dtype]
    }
    assert failing == {}
