"""A hook of mkdocs: puts the files outside docs/ that pages link to into the site.

So one relative link, such as `../examples/clipping.py`, works in the repository and in
the site, where text files end in .txt so that every browser shows them.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"\]\(\.\./([^)#]+)\)")
SHOWN_AS_THEY_ARE = {".png", ".svg"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {
        path
        for page in files.documentation_pages()
        for path in LINK.findall(page.content_string)
    }
    root = Path(config.docs_dir).parent
    for path in sorted(linked):
        if not (root / path).is_file():
            continue  # mkdocs reports the link
        shown = Path(path).suffix in SHOWN_AS_THEY_ARE
        # Where a page's `../examples/clipping.py` leads, seen from docs/.
        file = File(
            f"../{path}",
            config.docs_dir,
            config.site_dir,
            config.use_directory_urls,
            dest_uri=f"repository/{path}" + ("" if shown else ".txt"),
            inclusion=InclusionLevel.INCLUDED,
        )
        files.append(file)
    return files
