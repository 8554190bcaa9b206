"""The pages of docs/reference are those of the code, and links of the pages lead to headings that exist."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

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
        "    _exceptions(a, 'a.helper', b, 'said', 'mend it')\n"
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
