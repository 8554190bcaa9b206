"""The pages of docs/reference are those of the code, and the site has a place for every page and no dead link."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image

from unfog.config.describe import field_texts
from unfog.evaluation.metrics import MetricResult
from unfog.inference.evaluation_files import Evaluation
from unfog.inference.run import Run
from unfog.process.run_status import RunStatus
from unfog.reporting.findings import Finding

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "unfog"


@pytest.mark.slow
def test_pages_made_from_code_are_current():
    done = subprocess.run([sys.executable, "scripts/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_remedies_are_found_where_a_check_makes_them(scripts_on_path, monkeypatch, tmp_path):
    import reference

    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "one.py").write_text(
        "def other(x):\n    return f'from a function: {x}'\n"
        "def check(a, b):\n    'Check it.'\n    bad, remedy = a, f'--batch {b}' if a else 'fewer images'\n"
        "    finding = partial(Finding, 'a.partial')\n"
        "    finding('hint', 'said', other(b))\n"
        "    Finding('a.fine', 'fine', 'said')\n"
        "    exceptions(a, 'a.helper', b, 'said', 'mend it')\n"
        "    return Finding.graded('a.graded', 'said', (bad, 'hint', '', remedy), (b, 'hint', '', 'stop'), facts={})\n"
        "def several(code):\n    'a.one and a.two: check both.'\n    return Finding(code, 'hint', 'said', 'wait')\n"
    )
    monkeypatch.setattr(reference, "SOURCE", tmp_path)
    monkeypatch.setattr(reference, "OTHER_CHECKS", ())
    rows = [line for line in reference.findings_page().splitlines() if line.startswith("| `a.")]
    assert sorted(rows) == [
        "| `a.fine` | Check it. |  |",
        "| `a.graded` | Check it. | • --batch …<br>• fewer images<br>• stop |",
        "| `a.helper` | Check it. | mend it |",
        "| `a.one` | Check both. | wait |",
        "| `a.partial` | Check it. | from a function: … |",
        "| `a.two` | Check both. | wait |",
    ]


def test_every_code_of_a_finding_is_on_its_page():
    page, codes = (ROOT / "docs/reference/findings.md").read_text(), set()
    for module in SOURCE.rglob("*.py"):
        text = module.read_text()
        codes |= set(re.findall(r'Finding(?:\.graded)?\(\s*"([a-z.]+_?[a-z_]*)"', text))
        codes |= set(re.findall(r'partial\(Finding, "([a-z._]+)"', text))
        codes |= set(re.findall(r'_exceptions\(scan, "([a-z._]+)"', text))
    assert len(codes) > 50
    codes = {code for code in codes if code.partition(".")[0] in ("data", "gpu", "length", "run", "settings")}
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_attributes_have_the_text_under_their_field_and_not_that_of_their_type(scripts_on_path):
    import reference

    page = reference.python_page()
    assert f"### Run.calls\n\n{field_texts(Run)['calls']}\n\n### Run.d" in page
    for kind in (bool, dict, float, int, list, str, tuple):
        assert inspect.getdoc(kind).partition("\n")[0] not in page, kind
    assert re.findall(r"^(### .*)\n\n(?=#|\Z)", page, re.M) == []  # an attribute of which nothing is said


def test_every_event_and_variable_is_on_the_page_of_files():
    page, modules = (ROOT / "docs/reference/files.md").read_text(), [*SOURCE.rglob("*.py")]
    kinds, variables = set(), set()
    for module in modules:
        text = module.read_text()
        variables |= set(re.findall(r'"(UNFOG_[A-Z]+(?:_[A-Z]+)*)"', text))
        if ".event(" in text or "_tell(" in text or "_EVENT = " in text:
            kinds |= {kind for kind in _kinds(ast.parse(text)) if re.fullmatch("[a-z_]+", kind)}
    assert len(kinds) > 20
    assert len(variables) > 3
    assert [name for name in sorted(kinds | variables) if f"`{name}`" not in page] == []


def test_every_field_of_json_files_is_on_the_page_of_files(tmp_path):
    page = (ROOT / "docs/reference/files.md").read_text()
    names = {*RunStatus.read(tmp_path).as_json()}
    for kind in (Finding, Evaluation, MetricResult):
        names |= {field.name for field in fields(kind)}
    names -= {"figures"}  # of a finding, in its page alone
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def _kinds(tree):
    """Return the kinds of events that a module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("event", "_tell"):
                yield from (one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_EVENT"):
            yield node.value.value


def test_links_to_headings_work_where_the_pages_are_read_as_files():
    """The site names headings alike but for signs between spaces, which leave two hyphens more on a forge."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    names, dead = {page: _anchors(page.read_text("utf-8")) for page in pages}, []
    for page in pages:
        for path, anchor in re.findall(r"\]\(([^()\s:#]*)#([^()\s]+)\)", page.read_text("utf-8")):
            there = (page.parent / path).resolve() if path else page
            dead += [f"{page.name}: {path}#{anchor}"] * (there in names and anchor not in names[there])
    assert dead == []


def _anchors(text):
    """Return the anchors that a forge gives to the headings of a page, and those that the page sets itself."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    heads = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head) for head in re.findall("^#+ +(.*)", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads} | {
        *re.findall(r'<a id="([^"]+)"', text)
    }


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
    assert re.findall(r'<span class="long">(.*)</span>', found)[0].split("<wbr>")[:3] == ["tests/", "one_", "module."]
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


@pytest.mark.slow
def test_the_site_is_built_and_served_without_another_machine():
    subprocess.run([sys.executable, "scripts/site.py"], cwd=ROOT, check=True, capture_output=True)
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
    broken = [path for path in (SOURCE / "site").rglob("*.html") if re.search("```|\x02", path.read_text("utf-8"))]
    assert broken == []
    pages = re.findall(r"^- \[.*\]\((\S+)\): \w", (SOURCE / "site/llms.txt").read_text(), re.M)
    assert [page for page in pages if not (SOURCE / "site" / page / "index.html").is_file()] == []
    dead = [file for file in _linked(SOURCE / "site") if not file.exists()]
    assert dead == []
    about = json.loads((SOURCE / "site/finished-run.json").read_text())
    with Image.open(SOURCE / "site/finished-run.webp") as sheet:
        cells = [len(about["noise"]), len(about["steps"])]
        assert [side + about["gap"] for side in sheet.size] == [
            count * (side + about["gap"]) for count, side in zip(cells, about["size"], strict=True)
        ]
    front = (SOURCE / "site/index.html").read_text()
    assert re.findall(r"<li>\s*<p><strong>(\w+)", front)[-5:] == ["Good", "Nothing", "Problems", "Metrics", "Little"]
    assert re.findall(r'(?:src|href)="(https?:[^"]*\.(?:js|css|woff2?))"', page) == []


def _linked(site):
    """Yield the files that pages of the site, and their Markdown, link to; the server shows index.html of a folder."""
    for page in (page for page in site.rglob("*.html") if page.name != "404.html"):
        text = page.read_text("utf-8")
        for link in re.findall(r'<(?:a|img|link|script|source)\b[^>]*?(?:href|src|srcset)="([^":#?]+)(?=[#?"])', text):
            there = page.parent / link
            yield there / "index.html" if link.endswith("/") else there
    for page in site.rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        yield from (
            page.parent / link for link in re.findall(r"\]\(([^()\s:#]+)(?=[#)])", re.sub(r"`[^`]*`|    .*", "", text))
        )
