"""The HTML page of a report: whole, escaped, self-contained, and filtering."""

import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp._explain.text import amount

X = jnp.ones((2, 8))
VOID = {"meta", "input", "br", "link", "img", "hr"}
FOLDING = {"expand", "collapse"}
CHROMIUM = shutil.which("chromium")


class Parsed(HTMLParser):
    """A page's elements as (tag, attributes), its text, and that its tags match."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text += data

    def of_class(self, name):
        return [a for _, a in self.elements if name in a.get("class", "").split()]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.LayerNorm()(x))  # <script>alert("line")</script>


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Block()(x)
        return jnp.exp(nn.relu(x))


@pytest.fixture(scope="module")
def report():
    variables = Network().init(jax.random.key(0), X)
    explain = jamp.explain(Network().apply, residuals=True, device_type="gpu")
    return explain(variables, X)


@pytest.fixture(scope="module")
def page(report):
    return Parsed(report.to_html())


def test_tags_that_do_not_match_are_noticed():
    with pytest.raises(AssertionError):
        Parsed("<p><b>text</p></b>")


def test_the_page_is_whole_and_says_what_the_report_says(page, report):
    assert page.elements[0][0] == "html"
    for part in (
        report.header,
        "Nothing needs attention",
        f"{report.low_flop_share:.1%}",
        f"{report.low_byte_share:.1%}",
        f"3 of 3 matmuls and convolutions, {2 * 3 * 2 * 8 * 8} FLOP",
        "Kept for the backward pass",
        "flax.linen.LayerNorm",
        "float32: flax.linen.LayerNorm in gpu",
        "Block_2",
        "return jnp.exp(nn.relu(x))",
    ):
        assert part in page.text


def test_the_page_loads_nothing(report):
    html = report.to_html()
    assert "://" not in html
    assert not {"link", "img", "iframe"} & {tag for tag, _ in Parsed(html).elements}
    assert not re.search(r"\b(src|href|url|import|fetch)\b\s*[=(]", html)


def test_each_module_folds_and_each_row_can_be_filtered(page, report):
    def count(module):
        return 1 + sum(map(count, module.children))

    folds = [tag for tag, _ in page.elements if tag == "details"]
    assert len(folds) == count(report.modules)
    rows = page.of_class("row")
    buttons = [a for tag, a in page.elements if tag == "button" and "aria-pressed" in a]
    for key in ("data-dtype", "data-rule"):
        assert {row[key] for row in rows} == {b[key] for b in buttons if key in b}
    norms = [row for row in rows if row["data-path"].endswith("LayerNorm_0")]
    (norm,) = norms  # of three blocks that are alike
    assert "Block_0 Block_1 Block_2" in norm["data-path"]
    assert {(n["data-rule"], n["data-dtype"]) for n in norms} == {("float32", "f32")}
    dense = [row for row in rows if row["data-path"].endswith("Dense_0")]
    assert {(d["data-rule"], d["data-dtype"]) for d in dense} == {("lower", "f16")}


def test_modules_count_the_operations_of_their_rows(page, report):
    def shown(module):
        return sum(len(row.operations) for row in module.rows) + sum(
            map(shown, module.children)
        )

    assert shown(report.modules) < len(report.records)
    assert f"apply {shown(report.modules)} operations" in page.text
    block = report.modules.children[0].children[0]
    assert f"{block.name} {shown(block)} operations" in page.text
    assert "custom_jvp_call" in {record.primitive for record in report.records}
    assert "custom_jvp_call" not in page.text


def test_what_is_drawn_has_words_for_screen_readers(page, report):
    for bar in page.of_class("bar"):
        assert bar["role"] == "img"
        assert bar["aria-label"]
    first, *_ = page.of_class("bar")
    assert first["aria-label"] == "f16: 100.0%"
    buttons = [a["aria-label"] for tag, a in page.elements if a.get("id") in FOLDING]
    assert buttons == ["Open all modules", "Close all modules"]
    groups = [a["aria-label"] for _, a in page.elements if a.get("role") == "group"]
    assert groups == ["Filter by dtype", "Filter by rule"]
    assert [a for _, a in page.elements if a.get("role") == "status"]
    product = amount(report.flops)
    assert f"FLOPs {product}16 bits 100.0%" in page.text


def test_a_part_that_cannot_be_seen_is_not_drawn():
    def fn(x):
        return jnp.argmax(x), x @ x

    report = jamp.explain(fn, device_type="gpu")(jnp.ones((300, 300)))
    assert report.result_bytes["int32"] == 4
    labels = [a["aria-label"] for a in Parsed(report.to_html()).of_class("bar")]
    assert any("float16" in label for label in labels)
    assert not any("int32" in label for label in labels)


def test_what_needs_attention_is_marked():
    report = jamp.explain(lambda x: x @ x.T, enabled=False)(X)
    page = Parsed(report.to_html())
    assert page.of_class("bad")
    assert report.warnings[0] in page.text


def test_everything_is_escaped():
    evil = '<script>alert("x")</script>'

    def fn(x):
        with jax.named_scope(evil.replace("/", "|")):
            return x @ x.T

    fn.__name__ = evil
    policy = jamp.Policy.load("gpu").scoped(f"{evil}", "float32")
    html = jamp.explain(fn, device_type="gpu", policy=policy)(X).to_html()
    page = Parsed(html)
    assert [tag for tag, _ in page.elements].count("script") == 1
    for text in (evil, evil.replace("/", "|")):
        assert text not in html
        assert text in page.text


def test_a_users_line_is_shown_and_escaped(page):
    assert '# <script>alert("line")</script>' in page.text
    assert [tag for tag, _ in page.elements].count("script") == 1


def test_dollars_in_names_are_kept():
    def fn(x):
        with jax.named_scope("$name ${x}"):
            return x @ x.T

    assert "$name ${x}" in Parsed(jamp.explain(fn)(X).to_html()).text


def test_the_page_is_saved(report, tmp_path):
    path = tmp_path / "report.html"
    report.save_html(path)
    assert path.read_text(encoding="utf-8") == report.to_html()


def test_a_notebook_shows_the_page_in_a_frame(report):
    ((tag, attributes),) = Parsed(report._repr_html_()).elements
    assert tag == "iframe"
    assert attributes["srcdoc"] == report.to_html()


def test_a_program_without_operations_has_a_page():
    page = Parsed(jamp.explain(lambda x: x)(X).to_html())
    assert page.of_class("row") == []


def in_browser(report, script, tmp_path):
    """The text that a script, run after the page's own, leaves in its title."""
    path = tmp_path / "page.html"
    run = f"<script>document.title = String((() => {{ {script} }})())</script>"
    html = report.to_html().replace("</body>", f"{run}</body>")
    path.write_text(html, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *flags, profile, path.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    return unescape(re.search("<title>(.*?)</title>", done.stdout)[1])


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("action", "pattern"),
    [
        ("document.querySelector('[data-rule=lower][aria-pressed]').click()", "Dense"),
        ("search.value = 'LAYERNORM_0 block_1'", "LayerNorm"),
        ("search.value = 'nothing like it'", None),
    ],
)
def test_filters_leave_what_matches(report, action, pattern, tmp_path):
    script = (
        f"{action}; search.dispatchEvent(new Event('input')); return [...document"
        ".querySelectorAll('.row')].filter(row => row.checkVisibility())"
        ".map(row => row.querySelector('.title').firstChild.textContent.trim())"
        ".join('|') + '#' + document.getElementById('none').hidden"
    )
    names, found = in_browser(report, script, tmp_path).split("#")
    if pattern is None:
        assert (names, found) == ("", "false")
    else:
        assert names == f"flax.linen.{pattern}"
        assert found == "true"
