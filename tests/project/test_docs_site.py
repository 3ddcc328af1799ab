"""The documentation builds into a whole site, which loads nothing from elsewhere."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path

import pytest

import jamp
from jamp import pallas_kernels

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
# What the build reads beside docs/.
SOURCES = [
    "README.md",
    "jamp",
    "pallas_kernels",
    "policies",
    "examples",
    "benchmarks",
]
# What makes a browser fetch something, as opposed to a link that a reader follows.
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "use": "href",
}
FOLLOWED = {"canonical", "next", "prev", "alternate"}  # kinds of <link>
ELSEWHERE = re.compile(r"(https?:)?//")


def build(root, site):
    """Builds the site of a repository; the exit code and what was printed."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    code, printed = build(ROOT, folder)
    assert code == 0, printed
    return folder


class Loads(HTMLParser):
    """What a page loads from other servers."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        followed = set((given.get("rel") or "").split()) & FOLLOWED
        wanted = "href" if tag == "link" and not followed else LOADED.get(tag)
        if wanted and ELSEWHERE.match(given.get(wanted) or ""):
            self.found.append(given[wanted])


def loads_of_css(text):
    targets = re.findall(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)", text)
    return [t for pair in targets for t in pair if ELSEWHERE.match(t)]


def test_no_page_loads_anything_from_another_server(site):
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert pages and styles
    found = [load for page in pages for load in Loads(page.read_text("utf-8")).found]
    found += [load for css in styles for load in loads_of_css(css.read_text("utf-8"))]
    assert found == []


def test_the_search_works_in_pages_opened_from_files(site):
    """Browsers let such pages neither fetch an index nor start a worker."""
    index = (site / "search" / "search_index.js").read_text("utf-8")
    assert index.startswith("var __index = {")
    for page in (site / "index.html", site / "guide.html"):
        scripts = re.findall(
            r'<script src="([^"]*iframe-worker[^"]*)"', page.read_text()
        )
        assert [(site / name).exists() for name in scripts] == [True]


def test_the_first_page_has_the_tables_of_the_readme(site):
    readme = (ROOT / "README.md").read_text("utf-8")
    tables = re.findall(r"--8<-- \[start:\w+\](.*?)--8<-- \[end", readme, re.S)
    assert len(tables) == 2
    page = (site / "index.html").read_text("utf-8")
    for name in re.findall(r"^\| (\w[^|`]*) \|", "".join(tables), re.M):
        assert f"<td>{name}</td>" in page


def test_code_that_is_not_run_is_coloured(site):
    page = (site / "migration.html").read_text("utf-8")
    assert re.search(r'class="n">torch</span>.*GradScaler', page)


def test_a_load_from_another_server_is_found():
    page = (
        '<a href="https://a.b"></a><script src="//a.b/c.js"></script>'
        '<link rel="stylesheet" href="https://a.b"><link rel="next" href="https://a.b">'
    )
    assert Loads(page).found == ["//a.b/c.js", "https://a.b"]
    css = "@import 'https://a.b'; a { background: url(//a.b) url(c.png) }"
    assert loads_of_css(css) == ["https://a.b", "//a.b"]


def test_files_that_pages_link_to_are_in_the_site(site):
    name = "examples/two_models.py"
    page = (site / "migration.html").read_text("utf-8")
    assert f'href="repository/{name}.txt"' in page
    copied = site / "repository" / f"{name}.txt"
    assert copied.read_bytes() == (ROOT / name).read_bytes()


# Texts that pages are given, and what the build must then complain of.
LINKS = {
    "[a](no_page.md)": "'no_page.md'",
    "[a](policies.md#no-heading)": "'#no-heading'",
    "[a](../examples/no_file.py)": "'../examples/no_file.py'",
}
UNLISTED = {"A page.": "left_out.md"}
NAMES = {"::: jamp.no_name": "jamp.no_name"}  # ends the build


@pytest.mark.parametrize(
    "pages", [{"guide.md": LINKS, "left_out.md": UNLISTED}, {"api.md": NAMES}]
)
def test_faults_in_a_page_fail_the_build(pages, tmp_path):
    pytest.importorskip("mkdocs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in SOURCES:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for page, faults in pages.items():
        with (tmp_path / "docs" / page).open("a", encoding="utf-8") as file:
            file.writelines(f"\n{text}\n" for text in faults)
    code, printed = build(tmp_path, tmp_path / "site")
    assert code != 0
    for faults in pages.values():
        for complaint in faults.values():
            assert complaint in printed


def test_the_api_page_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    kernels = {f"pallas_kernels.{name}" for name in pallas_kernels.__all__}
    assert sorted(re.findall(r"^::: jamp\.(\S+)$", page, re.M)) == sorted(
        {*jamp.__all__, *kernels}
    )


def rows(page):
    """The cells of the tables of a page, by their first one."""
    lines = re.findall(r"^\| (.+) \|$", page.read_text("utf-8"), re.M)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


@pytest.mark.parametrize(
    "row, subject",
    [("transformer", "transformer"), ("ViT", "vit"), ("ResNet-50", "resnet50")],
)
def test_memory_on_the_first_page_is_what_was_measured(row, subject):
    (results,) = (ROOT / "benchmarks" / "results").glob("gpu_programs-cpu-*.json")
    figures = json.loads(results.read_text("utf-8"))["figures"]["subjects"][subject]
    autocast, float32 = figures["autocast float16"], figures["float32"]
    expected = [
        f"{autocast[figure] / float32[figure]:.2f}"
        for figure in ("residual_bytes", "temporary_bytes")
    ]
    assert rows(ROOT / "docs" / "index.md")[row] == expected


def broken_links(page):
    """Relative links of a Markdown file that lead nowhere."""
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text("utf-8"))
    relative = [target for target in targets if not ELSEWHERE.match(target)]
    return [target for target in relative if not (page.parent / target).exists()]


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
)
def test_links_outside_the_site_lead_somewhere(name):
    assert broken_links(ROOT / name) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#x) [b](none.md#x) [c](https://a.b) [d](#x)", "utf-8")
    assert broken_links(page) == ["none.md"]


def test_pages_say_how_jamp_is_installed_as_the_switch_has_it():
    names = run_path(str(ROOT / "docs" / "generate_install.py"))
    for page in names["PAGES"]:
        assert names["COMMAND"] in page.read_text("utf-8")
        assert names["written"](page) == page.read_text("utf-8")
