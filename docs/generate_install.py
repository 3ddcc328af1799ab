"""Writes how jamp is installed into the pages that say it.

On the day that the distribution is on the package index, set `PUBLISHED` to True, and
run `python docs/generate_install.py`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLISHED = False
PAGES = [ROOT / "README.md", ROOT / "docs" / "guide.md"]

COMMAND = "pip install jamp-jax" if PUBLISHED else "pip install ."
WHERE = "Into" if PUBLISHED else "From a clone of the repository, into"
TEXT = f"""\
{WHERE} a Python environment that has JAX for your device:

```text
{COMMAND}
```
"""
MARKED = re.compile(r"(?<=<!-- install -->\n).*?(?=<!-- /install -->)", re.DOTALL)


def written(page: Path) -> str:
    """A page with the way to install jamp between its marks."""
    return MARKED.sub(TEXT, page.read_text("utf-8"), count=1)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), "utf-8")
