"""The page's files: they fit together without a build, hold nothing inline, and stay small."""

import gzip
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from unfog.reporting.page.bundle import (  # given modules that the page does not have
    PAGE,
    _imports_of,
    _joined_script,
    embed,
    shell_html,
)

MODULES = sorted(path.name for path in PAGE.glob("*.js"))
PLAYGROUND = [name for name in MODULES if name.startswith("playground")]
"""Fetched only when it is opened, and no part of single files."""
# Bytes of all scripts, comments included: as they are written and as browsers get them; and of the playground's.
LARGEST, LARGEST_SENT, LARGEST_PLAYGROUND = 182_000, 71_300, 65_000
_NAMES = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def exports(name):
    text = (PAGE / name).read_text()
    listed = re.search(r"export\{([^}]*)\};?\s*$", text)
    return set(_NAMES.findall(text)) | {pair.split(" as ")[-1] for pair in (listed[1].split(",") if listed else [])}


@pytest.mark.parametrize("name", MODULES)
def test_every_import_is_exported(name):
    text = (PAGE / name).read_text()
    found = re.findall(r'^import (?:\{([^}]*)\} from )?"\./([\w./-]+\.js)";\n', text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^import\b", text, re.MULTILINE)) == len(_imports_of(text))
    assert not re.search(r"\bimport\(|\beval\(|new Function|export default|innerHTML|insertAdjacent|unsafeHTML", text)
    for names, module in found:
        wanted = {one.split(" as ")[0].strip() for one in names.split(",") if one.strip()}
        assert wanted <= exports(module), module
        for one in wanted:  # what is imported is used
            assert len(re.findall(rf"\b{one}\b", text)) > 1, one


def test_every_module_is_part_of_the_page():
    script = _joined_script()
    for name in MODULES:
        assert (f'$modules["{name}"] = ' in script) == (name not in PLAYGROUND)
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script


def test_nothing_is_inline_where_a_server_gives_the_page():
    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            names = dict(attrs)
            assert not any(name.startswith("on") or name == "style" for name in names)
            if tag == "script" and names.get("type") != "application/json":
                assert (PAGE / names["src"].removeprefix("static/")).is_file()
            if tag == "link" and names["href"] != "data:,":
                assert (PAGE / names["href"].removeprefix("static/")).is_file()
            assert tag != "style"

    Parser().feed((PAGE / "index.html").read_text())
    # An attribute `style`, or one that holds code, would need a weaker policy.
    for name in MODULES:
        assert not re.search(r"<[^>]*\s(?:style|on\w+)=[\"']", (PAGE / name).read_text()), name


def test_nothing_comes_from_elsewhere():
    for path in [PAGE / "index.html", PAGE / "style.css", *(PAGE / name for name in MODULES)]:
        assert not re.search(r"https?://|@import|url\(\s*['\"]?http", path.read_text()), path.name


def test_scripts_stay_small():
    texts = {path.name: path.read_bytes() for path in PAGE.rglob("*.js")}
    assert {"main.js", "playground.js", "lit.js"} <= texts.keys()
    assert sum(map(len, texts.values())) < LARGEST, {name: len(text) for name, text in texts.items()}
    assert sum(len(gzip.compress(text)) for text in texts.values()) < LARGEST_SENT
    assert 20_000 < sum(len(texts[name]) for name in PLAYGROUND) < LARGEST_PLAYGROUND


def test_vendored_files_are_those_that_are_named():
    table = (PAGE / "vendor" / "SOURCES.md").read_text()
    named = dict(re.findall(r"^\| `([\w.]+)` .* ([0-9a-f]{64}) \|$", table, re.MULTILINE))
    files = {path.name for path in (PAGE / "vendor").glob("*.*") if path.suffix in (".js", ".css")}
    assert set(named) == files
    for name, digest in named.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in (PAGE / "vendor").glob("LICENSE-*")} == {"LICENSE-lit"}


def test_each_feature_of_the_table_has_a_test():
    tests = Path(__file__).parents[1]
    rows = re.findall(
        r"^\| (\d+) \|.*\| `([\w/]+\.py)::(\w+)` \|$", (tests.parent / "docs/serve-features.md").read_text(), re.M
    )
    assert [int(number) for number, *_ in rows] == list(range(1, 38))
    for _, file, name in rows:
        assert f"def {name}(" in (tests / file).read_text(), name


def test_embedded_text_cannot_end_the_script():
    page = embed({"name": "</script><script>alert(1)</script>\u2028"}, "<b>", refresh=10)
    assert "<script>alert" not in page
    assert "\\u003c/script>" in page
    assert "<title>&lt;b> · Unfog</title>" in page
    assert page.count("<script") == shell_html().count("<script") == 2
    assert '<meta http-equiv="refresh" content="10">' in page
