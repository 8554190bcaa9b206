"""The site: what scripts/site.py makes of pages, the site that it builds, and how that behaves in a browser."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from browsers import WatchedPage, axe_violations, in_a_browser, open_browser, until

ROOT = Path(__file__).parents[2]
SITE = ROOT / "src" / "unfog" / "site"
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")


@pytest.fixture
def builder(scripts_on_path):
    """scripts/site.py, whose name is that of a module of Python."""
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "scripts/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_items_of_lists_keep_their_paragraphs_tables_and_code_on_the_site(builder):
    text = (
        "1. one\nwraps\n   wraps\n\n   | a |\n\n2. two:\n\n       code\n\n   - inner\n\n     more\n3. three\n\n"
        "After.\n\n    code\n\n- x\n\n  ```\n  - a\n    b\n  ```\n"
    )
    # Python-Markdown: what belongs to an item is four columns further in, code eight.
    assert builder.indent_lists(text) == (
        "1. one\nwraps\n    wraps\n\n    | a |\n\n2. two:\n\n        code\n\n    - inner\n\n        more\n\n"
        "3. three\n\nAfter.\n\n    code\n\n- x\n\n    ```\n    - a\n      b\n    ```\n"
    )


def test_install_lines_of_the_front_page_are_tabs_on_the_site(builder):
    text = builder.systems_as_tabs((ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(r'^=== "(.*)"$', text, re.M) == ["Windows (PowerShell)", "macOS", "Linux"]
    assert text.count('\n        pip install torch\n        pip install ".[all]"\n\n') == 3  # in their tabs
    other = "**Linux** is proven.\n\nText.\n\n**Good samples.** Text:\n\n    code\n"
    assert builder.systems_as_tabs(other) == other


def test_code_in_tables_is_broken_at_spaces_alone(builder):
    page = "<p><code>a b</code></p><td><code>--data.cache-limit 1</code> <b>x</b></td>\n<td>1.5 <code>[0.5]</code></td>"
    assert builder.keep_words_whole(page) == (
        "<p><code>a b</code></p><td><code><span>--data.<wbr>cache-limit</span> <span>1</span></code> <b>x</b></td>\n"
        "<td>1.5 <code><span>[0.5]</span></code></td>"
    )
    name = "tests/one_module.py::test_that_has_a_long_name"
    found = builder.keep_words_whole(f"<td><code>{name}</code></td>")
    (parts,) = re.findall(r'<span class="long">(.*)</span>', found)
    assert parts.split("<wbr>")[:4] == ["tests/", "one_", "module.py::", "test_"]
    assert re.sub("<[^>]*>", "", found) == name


def table(*rows):
    head, *body = rows
    lines = [
        "".join(f"<th>{cell}</th>" for cell in head),
        *("".join(f"<td>{cell}</td>" for cell in row) for row in body),
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def test_tables_with_long_rows_name_the_column_in_each_cell(builder):
    long, marks = "a guarantee that takes a whole line", builder.mark_tables
    marked = marks(table(["", 'b "c"', "d"], [long, long, ""], [long, f"<b>{long}</b>", "f"]))
    assert '<table role="table" data-stacked>' in marked
    cells = re.findall(r'<td[^>]*data-label="([^"]*)">(.*?)</td>', marked)
    second = "b &quot;c&quot;"
    assert cells[:3] == [("", long), (second, long), ("d", "")]
    assert cells[3:] == [("", long), (second, f"<b>{long}</b>"), ("d", "f")]
    assert re.findall("<td></td>|<th></th>", marked) == ["<td></td>"]  # an empty head is no head
    numbers = table(["n", "1", "2", "3"], ["KID", "0.1", "0.2", "0.3"])
    assert marks(numbers) == numbers
    two = table(["cause", "remedy"], [long, long])
    assert marks(two) == two  # two columns fit a phone


def test_pictures_lead_to_their_files_and_moving_ones_can_stand_still(builder, tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    frames[0].save(tmp_path / "fixed.webp")
    page = '<img src="x.png"><article><img alt="a" src="moving.webp"><img src="fixed.webp"></article>'
    shown = builder.open_pictures(page, tmp_path)
    assert shown.startswith('<img src="x.png"><article><a href="moving.webp"><picture><source ')
    assert '<source media="(prefers-reduced-motion: reduce)" srcset="moving-still.webp">' in shown
    assert shown.endswith('</a><a href="fixed.webp"><img loading="lazy" src="fixed.webp"></a></article>')
    linked = '<article><a href="b.html"><img alt="a" src="fixed.webp"></a></article>'
    assert builder.open_pictures(linked, tmp_path) == linked  # a link in a link is none
    odd = builder.open_pictures('<article><img alt="a > b" src="fixed.webp"></article>', tmp_path)
    assert odd == '<article><a href="fixed.webp"><img loading="lazy" alt="a > b" src="fixed.webp"></a></article>'
    red, _, blue = Image.open(tmp_path / "moving-still.webp").getpixel((4, 4))
    assert red < 50 < 200 < blue  # the last frame


def test_links_to_files_are_text_or_addresses_of_the_repository(builder, monkeypatch):
    text, page = "[a](../src/unfog/text.py#L3) and [b](guide.md#x)", ROOT / "docs/sampling.md"
    monkeypatch.setattr(builder, "addresses", dict)
    assert builder.convert(text, page) == "a (`src/unfog/text.py`) and [b](guide.md#x)"
    monkeypatch.setattr(builder, "addresses", lambda: {"Source": "https://host/us/unfog"})
    assert (
        builder.convert(text, page) == "[a](https://host/us/unfog/blob/HEAD/src/unfog/text.py#L3) and [b](guide.md#x)"
    )


@pytest.fixture(scope="module")
def site():
    """The folder of the site, built from the pages as they are."""
    subprocess.run([sys.executable, "scripts/site.py"], cwd=ROOT, check=True, capture_output=True)
    return SITE


@pytest.mark.slow
def test_the_site_is_built_and_served_without_another_machine(site):
    command = [sys.executable, "-m", "unfog", "docs", "sampling", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=120) as answer:
                page = answer.read().decode()
        finally:
            server.terminate()
    assert "<title>Sampling" in page
    # A fence that the generator does not know becomes text, with marks of its own inside.
    broken = [path for path in site.rglob("index.html") if re.search("```|\x02", path.read_text("utf-8"))]
    assert broken == []
    pages = re.findall(r"^- \[.*\]\((\S+)\): \w", (site / "llms.txt").read_text(), re.M)
    assert [page for page in pages if not (site / page / "index.html").is_file()] == []
    front = (site / "index.html").read_text()
    assert re.findall(r"<li>\s*<p><strong>(\w+)", front)[-5:] == ["Good", "Nothing", "Problems", "Metrics", "Little"]
    assert re.findall(r'(?:src|href)="(https?:[^"]*\.(?:js|css|woff2?))"', page) == []


@pytest.mark.slow
def test_pages_and_their_markdown_link_to_files_that_are_there(site):
    pages = [*site.rglob("index.html")]
    links = [file for page in pages for file in _files(page, r'<\w+\b[^>]*?(?:href|src|srcset)="(?!\w+:)([^"#?]+)')]
    # Its Markdown is where the links of other Markdown lead.
    links += [file for page in site.rglob("*.md") for file in _files(page, r"\]\((?!\w+:)([^()\s#]+)")]
    assert len(links) > 50 * len(pages)
    assert sorted({str(file) for file in links if not file.exists()}) == []
    assert all('<p class="foot"><a href="' in page.read_text("utf-8") for page in pages)


def _files(page, link):
    text = page.read_text("utf-8")
    if page.suffix == ".md":
        text = re.sub(r"^ *```.*?^ *```$|`[^`]*`|^    .*", "", text, flags=re.M | re.S)
    for target in re.findall(link, text):
        yield page.parent / target / ("index.html" if target.endswith("/") else "")


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@in_a_browser
def test_the_finished_run_follows_its_sliders(address, site):
    about = json.loads((site / "finished-run.json").read_text())
    with Image.open(site / "finished-run.webp") as sheet:
        counts = len(about["noise"]), len(about["steps"])
        whole = [count * (side + about["gap"]) for count, side in zip(counts, about["size"], strict=True)]
        assert [side + about["gap"] for side in sheet.size] == whole
    with open_browser() as browser:
        watched = WatchedPage(browser, viewport={"width": 1000, "height": 900})
        page = watched.page
        page.goto(f"{address}finished-run/")
        until(page, "!!document.querySelector('.finished-run canvas')")
        label = "document.querySelector('.finished-run canvas').ariaLabel"
        mean = (
            "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.reduce((a, b) => a + b) / 4 "
            "/ c.width / c.height)(document.querySelector('.finished-run canvas'))"
        )
        last = about["steps"][-1]
        assert page.evaluate(label) == f"Samples of step {last} of {last}, at 0% noise"
        finished = page.evaluate(mean)
        page.focus(".finished-run label:nth-of-type(2) input")
        page.keyboard.press("Home")
        assert page.evaluate(label) == f"Samples of step {last} of {last}, at {round(100 * about['noise'][0])}% noise"
        assert page.evaluate(mean) > finished + 10  # noise is brighter than clothes on black
        page.focus(".finished-run label:nth-of-type(1) input")
        page.keyboard.press("Home")
        assert page.evaluate(label).startswith(f"Samples of step 0 of {last}, at ")
        # The canvas is read by this test alone.
        assert [one for one in watched.troubles if not one.startswith("Canvas2D")] == []


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize(("scheme", "name"), [("light", ""), ("dark", "reliability/")])
def test_pages_are_accessible_and_fit_a_phone(address, scheme, name):
    with open_browser() as browser:
        desk = {"width": 1280, "height": 900}
        watched = WatchedPage(browser, viewport=desk, color_scheme=scheme, reduced_motion="reduce")
        page = watched.page
        page.goto(address + name)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className").startswith("md-skip")
        # The bars beside code blocks are the theme's, and all have one name.
        assert [one for one in axe_violations(page) if not one.startswith("landmark-unique")] == []
        assert any(url.endswith("hero-still.webp") for url in watched.requests) == (name == "")
        assert all(url.startswith((address, "data:", "blob:")) for url in watched.requests)
        page.set_viewport_size({"width": 390, "height": 844})
        widths = page.evaluate("[...document.querySelectorAll('[data-stacked] td')].map((e) => e.offsetWidth)")
        assert len(widths) > 10
        assert min(width for width in widths if width) > 200  # a cell has the line for itself
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
